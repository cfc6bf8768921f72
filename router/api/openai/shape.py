"""What OpenAI's routes ask of an answer's form, by the names of every server. Pure."""

import msgspec

from loraplex.router.api.openai.common import OpenAIBody, with_shared
from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import check_patterns
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.shapes import (
    check_ends,
    choice_of,
    format_shape,
    grammar_of,
    json_of,
    only_shape,
    regex_of,
    structured_shapes,
    whitespace_of,
)
from loraplex.router.call import GenerationCall
from loraplex.router.shape.shape import AnyJson, Shape
from loraplex.server.protocol import SamplingParams


def with_shape(call: GenerationCall, request: OpenAIBody, limits: ApiLimits) -> GenerationCall:
    """The call, what bodies say alike, and what its answer must be. Raises RequestError."""
    call = with_shared(call, request, limits)
    shape = _asked(request)
    ignores = "ignore_eos" if request.ignore_eos else "ignore_eos_token"
    check_ends(shape, call.sampling.ignore_eos, ignores)
    allowed, words = request.allowed_token_ids, request.bad_words or []
    require(allowed is None or allowed, "leaves no token", "allowed_token_ids")
    most = limits.max_bad_words
    require(len(words) <= most, f"expected at most {most}, got {len(words)}", "bad_words")
    longest = max(map(len, words), default=0)
    most = limits.max_stop_chars
    require(longest <= most, f"expected at most {most} characters, got {longest}", "bad_words")
    sampling = msgspec.structs.replace(
        _listing(call.sampling, request, limits),
        allowed_token_ids=tuple(sorted({*(allowed or ())})),
    )
    return msgspec.structs.replace(
        call,
        shape=shape,
        bad_words=tuple(words),
        sampling=sampling,
        stop_regex=check_patterns(request.stop_regex or (), limits),
    )


def _listing(sampling: SamplingParams, body: OpenAIBody, limits: ApiLimits) -> SamplingParams:
    """Tokens that are listed take the place of the likeliest, as vLLM has it. Raises
    RequestError."""
    listed, most = body.logprob_token_ids or (), limits.max_logprobs
    if not listed:
        return sampling
    require(sampling.logprobs is not None, "needs `logprobs`", "logprob_token_ids")
    size = f"expected at most {most} ids, got {len(listed)}"
    require(len(listed) <= most, size, "logprob_token_ids")
    return msgspec.structs.replace(sampling, logprobs=0, logprob_token_ids=tuple(listed))


def _asked(body: OpenAIBody) -> Shape | None:
    """What all of them ask for together. Raises RequestError, for two that differ, too."""
    spaces = whitespace_of(body.guided_whitespace_pattern, "guided_whitespace_pattern")
    guided = [
        json_of(body.guided_json, "guided_json", spaces),
        AnyJson("guided_json_object", spaces) if body.guided_json_object else None,
    ]
    require(spaces is None or any(guided), "needs `guided_json`", "guided_whitespace_pattern")
    return only_shape(
        [
            format_shape(body.response_format, "response_format"),
            *structured_shapes(body.structured_outputs),
            *guided,
            regex_of(body.guided_regex, "guided_regex"),
            choice_of(body.guided_choice, "guided_choice"),
            grammar_of(body.guided_grammar, "guided_grammar"),
            json_of(body.json_schema, "json_schema"),
            regex_of(body.regex, "regex"),
            grammar_of(body.ebnf, "ebnf"),
            grammar_of(body.grammar, "grammar"),
        ]
    )
