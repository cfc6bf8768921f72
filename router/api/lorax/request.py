"""LoRAX's `/`, `/generate` and `/generate_stream`: request bodies, and fields that are not read.
Pure."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.adapters.common.nearest import nearest
from loraplex.router.api.lorax.generated import LoraxFormatter, LoraxOptions
from loraplex.router.api.openai.common import OpenAIBody
from loraplex.router.api.request.body import decode_plain, require, same, typed
from loraplex.router.api.request.fields import (
    GenerationFields,
    NonNegative,
    Off,
    Positive,
    StopString,
    adapter_named,
    check_counts,
    sampling_params,
    with_fields,
)
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import ALIASES, ELSEWHERE, Elsewhere
from loraplex.router.api.request.shapes import check_ends, format_shape, only_shape
from loraplex.router.call import (
    BASE_PLACEHOLDERS,
    AdapterChoice,
    GenerationCall,
    MergedChoice,
    RequestError,
)
from loraplex.router.shape.shape import Shape
from loraplex.server.protocol import SamplingParams

BODY_FIELDS = ("inputs", "parameters", "stream")
# Beside `parameters`, whatever they say: how Hugging Face's own API is to treat the request.
HARMLESS = ("options",)
# Names of other servers, and what says the same inside `parameters`.
SAID_HERE = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    "min_new_tokens": "min_tokens",
    **dict.fromkeys(("sampling_seed", "random_seed"), "seed"),
    "extra_key": "cache_salt",
    "stop_sequences": "stop",
    **dict.fromkeys(("model", "lora_id", "lora_name", "lora_path"), "adapter_id"),
    "adapter_parameters": "merged_adapters",
    **dict.fromkeys(("logprobs", "return_token_ids"), "details"),
    "prompt_logprobs": "decoder_input_details",
    "ignore_eos": "ignore_eos_token",
    "echo": "return_full_text",
    **dict.fromkeys(("structured_outputs", "json_schema", "regex", "ebnf"), "response_format"),
    **dict.fromkeys(("guided_json", "guided_json_object"), "response_format"),
    **dict.fromkeys(("guided_regex", "guided_grammar"), "response_format"),
    "truncate_prompt_tokens": "truncate",
}
_LEAST = ("min_new_tokens", "min_tokens")
# Other servers' names of `inputs` and `parameters`.
_SAID_BESIDE = {"prompt": "inputs", "text": "inputs", "sampling_params": "parameters"}
# Values that ask for nothing, of names known here or on OpenAI's routes; empty ones do, too.
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    **dict.fromkeys(("min_p", "min_tokens", "min_new_tokens", "priority", "top_n_tokens"), 0),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "drafts"), True),
    "add_special_tokens": True,
    "include_stop_str_in_output": True,
}


def by_own_name(plain: dict[str, Any]) -> dict[str, Any]:
    """Returns the body with `min_tokens` in `parameters` where these say `min_new_tokens` alone."""
    inside = plain.get("parameters")
    if not isinstance(inside, dict) or inside.get("min_tokens") is not None:
        return plain
    others = {name: value for name, value in inside.items() if name not in _LEAST}
    return {**plain, "parameters": {**others, "min_tokens": inside.get("min_new_tokens")}}


def check_fields(plain: dict[str, Any], known: Collection[str], limits: ApiLimits) -> None:
    """Checks that every field of a body is known and stands in its right place. plain: the body.
    known: parameters that are read. Raises RequestError.
    """
    inside = plain.get("parameters")
    parameters: dict[str, Any] = inside if isinstance(inside, dict) else {}
    for name, value in parameters.items():
        if not (name in known or _asks_for_nothing(name, value, known, limits)):
            _refuse(name, value, parameters, known)
    for name, value in plain.items():
        if name in BODY_FIELDS or name in HARMLESS or _asks_for_nothing(name, value, known, limits):
            continue
        if name not in known:
            _refuse(name, value, parameters, (*BODY_FIELDS, *known))
        elif not _repeats(parameters, name, value):
            raise RequestError("invalid", f"`{name}` belongs inside `parameters`", param=name)


def _refuse(name: str, value: Any, parameters: dict[str, Any], known: Collection[str]) -> None:
    """Refuses a field, unless `parameters` says the same by its own name. Raises RequestError."""
    if name in SAID_HERE and _repeats(parameters, SAID_HERE[name], value):
        return
    instead = _instead(name)
    if instead is not None:
        raise RequestError("unsupported", f"`{name}` is {instead}", param=name)
    shown, likely = name[:100], nearest(name.replace("-", "_"), known)
    meant = f"; did you mean `{likely}`?" if likely else ""
    raise RequestError("unknown_parameter", f"`{shown}`: unknown parameter{meant}", param=shown)


def _instead(name: str) -> str | None:
    """Says what to use in place of a field; None for a name that nobody knows."""
    if name in SAID_HERE:
        return f"not known here: use `{SAID_HERE[name]}` inside `parameters`"
    if name in _SAID_BESIDE:
        return f"not known here: use `{_SAID_BESIDE[name]}`"
    if name in (*OpenAIBody.__struct_fields__, *ALIASES):
        return f"not supported here yet: `/v1/completions` has `{name}`"
    field = ELSEWHERE.get(name)
    if field is None:
        return None
    # Names in the other hints are those of OpenAI's routes.
    hint = field.hint if "`/v1" in field.hint or "`" not in field.hint else ""
    return "not supported yet" + (f": {hint}" if hint else "")


def _asks_for_nothing(name: str, value: Any, known: Collection[str], limits: ApiLimits) -> bool:
    if name == "model" and value in (*BASE_PLACEHOLDERS, *limits.base_names):
        return True
    if name in _NEUTRAL:
        field = Elsewhere(("", [], {}, _NEUTRAL[name]))
    elif name in ELSEWHERE and name not in known:
        field = ELSEWHERE[name]
    else:
        is_known = name in (*known, *SAID_HERE, *OpenAIBody.__struct_fields__, *ALIASES)
        field = Elsewhere() if is_known else Elsewhere(())
    return field.asks_for_nothing(value)


def _repeats(parameters: dict[str, Any], name: str, value: Any) -> bool:
    """Checks whether `parameters` says the same."""
    return name in parameters and same(value, parameters[name])


# `/` answers with a list of one or a stream, as `stream` says.
Route = Literal["/", "/generate", "/generate_stream"]
# LoRAX's name of one thing, and TGI's.
_LIKELY = ("return_k_alternatives", "top_n_tokens")
# The model's advice that LoRAX's routes take: draws have LoRAX's own defaults.
_ADVISED = ("repetition_penalty", "min_tokens")


class LoraxParameters(GenerationFields, frozen=True, kw_only=True):
    """Parameters of a request in LoRAX's shape. Every field may be null or absent. Neither sampling
    field set: greedy.

    adapter_id: alias or reference; null or "" = the base. details: adds `details` to the answer.
    add_special_tokens: around `inputs`; true by default. grammar: TGI's name for response_format.
    top_n_tokens: TGI's for return_k_alternatives; 0 = none.
    """

    adapter_id: str | None = None
    best_of: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e4)] | None = None
    do_sample: bool | None = None
    max_new_tokens: Positive | None = None
    return_full_text: bool | None = None
    stop: list[StopString] | None = None
    truncate: Positive | None = None
    watermark: Off = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_k_alternatives: Positive | None = None
    top_n_tokens: NonNegative | None = None
    apply_chat_template: Off = None
    seed: Annotated[int, Meta(ge=0, extra_json_schema={"maximum": 2**64 - 1})] | None = None
    response_format: dict[str, Any] | None = None
    grammar: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class LoraxBody(msgspec.Struct, frozen=True):
    """A request. stream: decides on `/`; `/generate` refuses true."""

    inputs: Annotated[str, Meta(min_length=1)]
    parameters: LoraxParameters | None = None
    stream: bool | None = None


def parse(
    body: bytes, limits: ApiLimits, bearer: str | None = None, route: Route = "/"
) -> ApiRequest:
    """Reads the body of a request in LoRAX's shape. Raises RequestError."""
    return parse_plain(decode_plain(body), limits, bearer, route)


def parse_plain(
    plain: dict[str, Any], limits: ApiLimits, bearer: str | None, route: Route
) -> ApiRequest:
    """Reads a request in LoRAX's shape whose JSON is decoded already. Raises RequestError."""
    plain = by_own_name(plain)
    check_fields(plain, LoraxParameters.__struct_fields__, limits)
    request = typed(plain, LoraxBody)
    given = request.parameters or LoraxParameters()
    _refuse_unsupported(given)
    stream = _streams(request, route)
    best_of = given.best_of or 1
    _check_best_of(given, best_of, stream)
    details = _details_wanted(given, stream)
    call = GenerationCall(
        api="lorax",
        prompts=(request.inputs,),
        messages=None,
        adapter=_adapter(given, limits, bearer),
        sampling=_sampling(given, limits, with_logprobs=stream or details or best_of > 1),
        max_tokens=given.max_new_tokens,
        n=best_of,
        best_of=best_of,
        stop=tuple(given.stop or ()),
        include_stop=True,
        stream=stream,
        seed=given.seed,
        add_special_tokens=given.add_special_tokens is not False,
        truncate=given.truncate,
        shape=_shape(given),
    )
    options = LoraxOptions(
        as_list=route == "/",
        details=details,
        full_text=bool(given.return_full_text),
        show_seed=call.sampling.temperature > 0,
        alternatives=given.return_k_alternatives,
        top_tokens=given.top_n_tokens or None,
    )
    return ApiRequest(with_fields(call, given), LoraxFormatter, options)


def _shape(given: LoraxParameters) -> Shape | None:
    shape = only_shape(
        [
            format_shape(given.response_format, "response_format"),
            format_shape(given.grammar, "grammar"),
        ]
    )
    check_ends(shape, bool(given.ignore_eos_token), "ignore_eos_token")
    return shape


def _streams(request: LoraxBody, route: Route) -> bool:
    require(
        route != "/generate" or not request.stream,
        "answers of `/generate` are whole: use `/generate_stream`, or `/`",
        "stream",
    )
    return route == "/generate_stream" or (route == "/" and bool(request.stream))


def _details_wanted(given: LoraxParameters, stream: bool) -> bool:
    require(
        not (given.decoder_input_details and stream),
        "input details are not available when streaming",
        "decoder_input_details",
    )
    details = bool(given.details or given.decoder_input_details)
    for name in _LIKELY:
        require(stream or details or not getattr(given, name), "needs `details`", name)
    return details


def _refuse_unsupported(given: LoraxParameters) -> None:
    refused = {
        "watermark": given.watermark,
        "apply_chat_template": given.apply_chat_template,
    }
    for name, is_set in refused.items():
        if is_set:
            raise RequestError("unsupported", f"`{name}` is not supported yet", param=name)


def _check_best_of(given: LoraxParameters, best_of: int, stream: bool) -> None:
    if best_of > 1:
        require(not stream, "several sequences are not available when streaming", "best_of")
        require(_is_sampling(given), "several sequences need sampling: set `do_sample`", "best_of")


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
    check_counts(given, given.max_new_tokens, limits)
    seed, alternatives = given.seed, max(getattr(given, name) or 0 for name in _LIKELY)
    require(seed is None or seed < 2**64, "expected a 64-bit unsigned integer", "seed")
    temperature = 1.0 if given.temperature is None else given.temperature
    advised = limits.sampling_defaults.items()
    return sampling_params(
        given,
        {name: value for name, value in advised if name in _ADVISED},
        temperature=temperature if _is_sampling(given) else 0.0,
        ignore_eos=bool(given.ignore_eos_token),
        logprobs=alternatives if with_logprobs or alternatives else None,
        prompt_logprobs=0 if given.decoder_input_details else None,
        processed=limits.processed_logprobs,
    )


def _adapter(
    given: LoraxParameters, limits: ApiLimits, bearer: str | None
) -> AdapterChoice | MergedChoice | None:
    needs = "needs `adapter_id` or `merged_adapters`"
    return adapter_named(given, given.adapter_id, "adapter_id", limits, bearer, needs)
