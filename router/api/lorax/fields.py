"""Fields that LoRAX's routes do not read: in a wrong place, of other servers, or unknown. Pure.

A field that asks for something and is not read here is refused by name.
"""

from collections.abc import Collection
from typing import Any

from loraplex.router.api.openai.common import OpenAIBody
from loraplex.router.api.request.aliases import ALIASES
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.api.request.known_elsewhere import ELSEWHERE, Elsewhere, nearest, same
from loraplex.router.call import BASE_PLACEHOLDERS, RequestError

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
# What stands in their bodies where `inputs` and `parameters` stand here.
_SAID_BESIDE = {"prompt": "inputs", "text": "inputs", "sampling_params": "parameters"}
# Of names that are known here or on OpenAI's routes: values that ask for nothing, beside the empty.
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    **dict.fromkeys(("min_p", "min_tokens", "min_new_tokens", "priority", "top_n_tokens"), 0),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "drafts"), True),
    "add_special_tokens": True,
    "include_stop_str_in_output": True,
}


def by_own_name(plain: dict[str, Any]) -> dict[str, Any]:
    """The body, with `min_tokens` in `parameters` where these say `min_new_tokens` alone."""
    inside = plain.get("parameters")
    if not isinstance(inside, dict) or inside.get("min_tokens") is not None:
        return plain
    others = {name: value for name, value in inside.items() if name not in _LEAST}
    return {**plain, "parameters": {**others, "min_tokens": inside.get("min_new_tokens")}}


def check_fields(plain: dict[str, Any], known: Collection[str], limits: ApiLimits) -> None:
    """plain: the body. known: parameters that are read. Raises RequestError."""
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
    """Raises RequestError unless `parameters` says the same by the name that is known here."""
    if name in SAID_HERE and _repeats(parameters, SAID_HERE[name], value):
        return
    instead = _instead(name)
    if instead is not None:
        raise RequestError("unsupported", f"`{name}` is {instead}", param=name)
    shown, likely = name[:100], nearest(name, known)
    meant = f"; did you mean `{likely}`?" if likely else ""
    raise RequestError("unknown_parameter", f"`{shown}`: unknown parameter{meant}", param=shown)


def _instead(name: str) -> str | None:
    """None of a name that nobody knows."""
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
    """Whether `parameters` says the same."""
    return name in parameters and same(value, parameters[name])
