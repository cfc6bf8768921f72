"""LoRAX's `/`, `/generate` and `/generate_stream`: request bodies and answers. Pure.

Fields this API does not have are ignored, as LoRAX does, except those that would be lost silently:
parameters that stand beside `parameters`, and names that other servers give a meaning.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from router.api.body import decode_body, require
from router.api.fields import (
    Penalty,
    Positive,
    Probability,
    RepetitionPenalty,
    StopString,
    TopK,
    check_stops,
    choose_adapter,
    credential,
    temperature_of,
)
from router.api.formatter import ApiLimits
from router.api.lorax_answer import LoraxFormatter, LoraxOptions
from router.api.lorax_merge import MergedAdapters, choose_merge
from router.generation import (
    BASE_PLACEHOLDERS,
    AdapterChoice,
    AnswerHead,
    GenerationCall,
    MergedChoice,
    RequestError,
)
from server.protocol import SamplingParams

# `/` answers with a list of one or a stream, as `stream` says; the others ignore `stream`.
Route = Literal["/", "/generate", "/generate_stream"]

# Names that other servers give a meaning: what says the same here, what says it on OpenAI's routes,
# and what nothing does.
_SAID_HERE = {
    "max_tokens": "max_new_tokens",
    "stop_sequences": "stop",
    "model": "adapter_id",
    "lora_id": "adapter_id",
    "adapter_parameters": "merged_adapters",
    "top_n_tokens": "return_k_alternatives",
    "logprobs": "details",
}
_SAID_ON_OPENAI = {
    **{name: name for name in ("logit_bias", "min_p", "n", "stop_token_ids", "min_tokens")},
    "min_new_tokens": "min_tokens",
}
_FOREIGN = (
    *(*_SAID_HERE, *_SAID_ON_OPENAI),
    *("grammar", "schema", "regex", "choice", "guided_json", "json_schema", "tools"),
    *("num_beams", "early_stopping", "length_penalty", "no_repeat_ngram_size", "bad_words"),
    "skip_special_tokens",
)
# What they ask for when it is what is done anyway; of all others it is false.
_NEUTRAL = {
    **dict.fromkeys(("n", "num_beams", "length_penalty"), 1),
    **dict.fromkeys(("min_p", "min_tokens", "min_new_tokens", "no_repeat_ngram_size"), 0),
    "top_n_tokens": 0,
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens"), True),
}


class LoraxParameters(msgspec.Struct, frozen=True):
    """Every field may be null or absent. Neither sampling field set: greedy.

    adapter_id: alias or reference; null or "" = the base. details: adds `details` to the answer.
    merged_adapters: not beside an adapter_id. add_special_tokens: around `inputs`; true unless told
    otherwise.
    """

    adapter_id: str | None = None
    adapter_source: str | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: str | None = None
    best_of: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e4)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    top_k: TopK | None = None
    top_p: Probability | None = None
    typical_p: Probability | None = None
    do_sample: bool | None = None
    max_new_tokens: Positive | None = None
    ignore_eos_token: bool | None = None
    return_full_text: bool | None = None
    stop: list[StopString] | None = None
    truncate: Positive | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_k_alternatives: Positive | None = None
    apply_chat_template: bool | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class LoraxBody(msgspec.Struct, frozen=True):
    """A request. stream: on `/` only."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: LoraxParameters | None = None
    stream: bool | None = None


class LoraxRequest(msgspec.Struct, frozen=True):
    """A parsed body; an ApiRequest."""

    call: GenerationCall
    options: LoraxOptions

    def formatter(self, head: AnswerHead) -> LoraxFormatter:
        return LoraxFormatter(head, self.options)


def parse(
    body: bytes, limits: ApiLimits, bearer: str | None = None, route: Route = "/"
) -> LoraxRequest:
    """Raises RequestError."""
    request, plain = decode_body(body, LoraxBody)
    given = request.parameters or LoraxParameters()
    _refuse_unsupported(given)
    _refuse_lost(plain, limits)
    stream = route == "/generate_stream" or (route == "/" and bool(request.stream))
    best_of = given.best_of or 1
    _check_best_of(given, best_of, stream, limits)
    require(
        not (given.decoder_input_details and stream),
        "input details are not available when streaming",
        "decoder_input_details",
    )
    details = bool(given.details or given.decoder_input_details)
    call = GenerationCall(
        api="lorax",
        prompts=(request.inputs,),
        messages=None,
        adapter=_adapter(given, limits, bearer),
        sampling=_sampling(given, limits, with_logprobs=stream or details or best_of > 1),
        max_tokens=given.max_new_tokens,
        n=best_of,
        best_of=best_of,
        stop=check_stops(given.stop or [], limits),
        include_stop=True,
        echo=False,
        stream=stream,
        seed=given.seed,
        add_special_tokens=given.add_special_tokens is not False,
        truncate=given.truncate,
    )
    options = LoraxOptions(
        as_list=route == "/",
        details=details,
        full_text=bool(given.return_full_text),
        show_seed=call.sampling.temperature > 0,
        alternatives=given.return_k_alternatives is not None,
    )
    return LoraxRequest(call, options)


def _refuse_unsupported(given: LoraxParameters) -> None:
    refused = {
        "watermark": given.watermark,
        "apply_chat_template": given.apply_chat_template,
        "response_format": given.response_format not in (None, {}, {"type": "text"}),
    }
    for name, is_set in refused.items():
        if is_set:
            raise RequestError("unsupported", f"`{name}` is not supported yet", param=name)


def _refuse_lost(body: dict[str, Any], limits: ApiLimits) -> None:
    """Raises RequestError for what asks for something in a place or by a name not read here."""
    inside: dict[str, Any] = body.get("parameters") or {}

    def is_lost(name: str, value: Any, known: str | None) -> bool:
        if known in inside and _same(value, inside[known]):
            return False
        return not _asks_for_nothing(name, value, limits)

    for name in LoraxParameters.__struct_fields__:
        if name in body and is_lost(name, body[name], name):
            raise RequestError("invalid", f"`{name}` belongs inside `parameters`", param=name)
    for fields in (inside, body):
        for name in _FOREIGN:
            if name in fields and is_lost(name, fields[name], _SAID_HERE.get(name)):
                raise RequestError("unsupported", f"`{name}` is {_instead(name)}", param=name)


def _asks_for_nothing(name: str, value: Any, limits: ApiLimits) -> bool:
    if name == "model" and value in (*BASE_PLACEHOLDERS, *limits.base_names):
        return True
    return value is None or value in ("", [], {}) or _same(value, _NEUTRAL.get(name, False))


def _same(one: Any, other: Any) -> bool:
    """To Python 1 is true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _instead(name: str) -> str:
    if name in _SAID_HERE:
        return f"not known here: use `{_SAID_HERE[name]}` inside `parameters`"
    if name in _SAID_ON_OPENAI:
        return f"not supported here yet: `/v1/completions` has `{_SAID_ON_OPENAI[name]}`"
    return "not supported yet"


def _check_best_of(given: LoraxParameters, best_of: int, stream: bool, limits: ApiLimits) -> None:
    most = limits.max_n
    require(best_of <= most, f"expected at most {most}, got {best_of}", "best_of")
    if best_of > 1:
        require(not stream, "several sequences are not available when streaming", "best_of")
        require(_is_sampling(given), "several sequences need sampling: set `do_sample`", "best_of")
        require(given.seed is None, "a seed is not available with `best_of` > 1", "seed")


def _is_sampling(given: LoraxParameters) -> bool:
    if given.temperature == 0:
        return False
    return (
        bool(given.do_sample)
        or given.temperature not in (None, 1.0)
        or (given.top_k or 0) > 0
        or given.top_p is not None
        or given.typical_p not in (None, 1.0)
    )


def _sampling(given: LoraxParameters, limits: ApiLimits, *, with_logprobs: bool) -> SamplingParams:
    seed, alternatives = given.seed, given.return_k_alternatives
    require(seed is None or seed < 2**64, "expected a 64-bit unsigned integer", "seed")
    require(
        (alternatives or 0) <= limits.max_logprobs,
        f"expected at most {limits.max_logprobs}, got {alternatives}",
        "return_k_alternatives",
    )
    temperature = 1.0 if given.temperature is None else given.temperature
    return SamplingParams(
        temperature=temperature_of(temperature) if _is_sampling(given) else 0.0,
        top_k=max(0, given.top_k or 0),
        top_p=given.top_p or 1.0,
        typical_p=given.typical_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        presence_penalty=given.presence_penalty or 0.0,
        ignore_eos=bool(given.ignore_eos_token),
        logprobs=(alternatives or 0) if with_logprobs or alternatives else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
    )


def _adapter(
    given: LoraxParameters, limits: ApiLimits, bearer: str | None
) -> AdapterChoice | MergedChoice | None:
    token = credential(given.api_token, bearer)
    if given.merged_adapters is None:
        return choose_adapter(given.adapter_id, given.adapter_source, token, "adapter_id", limits)
    if given.adapter_id:
        message = "`adapter_id` and `merged_adapters` cannot both be given"
        raise RequestError("invalid", message, param="merged_adapters")
    return choose_merge(given.merged_adapters, given.adapter_source, token, limits)
