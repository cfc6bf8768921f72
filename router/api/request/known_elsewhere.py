"""Fields that only other servers know: values without effect pass, others get advice. Pure.

The servers are vLLM, SGLang, TGI, LoRAX and OpenAI itself. A value that asks for nothing passes.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from loraplex.adapters.common.nearest import nearest
from loraplex.router.api.request.body import agreed, same, typed
from loraplex.router.call import RequestError

_SHOWN = 100
_EMPTY: tuple[Any, ...] = (False, "", [], {})


class Elsewhere(msgspec.Struct, frozen=True):
    """Field that other servers know and this one does not serve. neutral: values that ask for
    nothing, beside null. hint: what to do, or why it is not so.
    """

    neutral: tuple[Any, ...] = _EMPTY
    hint: str = ""

    def asks_for_nothing(self, value: Any) -> bool:
        if isinstance(value, dict):
            value = {key: part for key, part in value.items() if part is not None}
        return value is None or any(same(value, one) for one in self.neutral)


_FORM = "use `response_format` or `structured_outputs`"
_NO_SEARCH = "answers are drawn, or greedy"
_NO_CHOICE = "where a request runs is the router's choice"
_TEXTS = "answers are texts"
_INPUTS = "texts are read, and images of messages"
_IMAGES = "the model's own files say how images are read"
_MODEL = "put the adapter's name into `model`"
_COMPLETIONS = "`/v1/completions` has it"
_CHAT = "`/v1/chat/completions` has it"
_BESIDE = "its fields stand in the body itself"


def _row(names: str, hint: str = "", *neutral: Any) -> dict[str, Elsewhere]:
    """Several fields with one hint. names: with spaces between. neutral: beside empty ones."""
    return dict.fromkeys(names.split(), Elsewhere((*_EMPTY, *neutral), hint))


def _only(names: str, hint: str, *neutral: Any) -> dict[str, Elsewhere]:
    """Several fields, as of `_row`, where false and empty values ask for something, too."""
    return dict.fromkeys(names.split(), Elsewhere(neutral, hint))


ELSEWHERE: dict[str, Elsewhere] = {
    # Output of a given form
    **_row("structural_tag guided_decoding grammar choice schema guideline", _FORM),
    # Tools and reasoning
    **_row("tools functions", _CHAT),
    **_row("tool_choice function_call", _CHAT, "auto", "none"),
    **_only("parallel_tool_calls", _CHAT, True, False),
    **_row("tool_prompt", "the chat template describes the tools to the model"),
    **_row("reasoning_effort", _CHAT, "none"),
    **_row("reasoning thinking enable_thinking", _CHAT),
    **_only("thinking_token_budget thinking_budget", _CHAT, -1),
    **_row("include_reasoning separate_reasoning stream_reasoning", _CHAT, True),
    **_row("verbosity", "say so in the prompt", "medium"),
    **_row("task", "say so in the prompt"),
    # How tokens are drawn
    **_row("use_beam_search early_stopping", _NO_SEARCH),
    **_row("num_beams", _NO_SEARCH, 1),
    **_only("length_penalty", _NO_SEARCH, 1),
    **_row("best_of", "ask for `n` answers", 1),
    **_only("do_sample", "`temperature` 0 is greedy", True),
    **_row("logits_processors custom_logit_processor custom_params", "`logit_bias` weighs tokens"),
    **_row(
        "no_repeat_ngram_size repetition_ngram_size repetition_ngram_threshold",
        "`repetition_penalty` holds repetition back",
        0,
    ),
    **_row("repetition_detection", "`repetition_penalty` holds repetition back"),
    **_row("watermark watermarking"),
    # Reports on tokens
    **_row("token_ids_logprob", "use `logprob_token_ids`"),
    **_row("logprob_token_ids stop_regex", _COMPLETIONS),
    **_row("top_logprobs top_n_tokens return_k_alternatives", "use `logprobs`", 0),
    **_row("details return_logprob flat_logprobs", "use `logprobs`"),
    **_row("decoder_input_details", "use `prompt_logprobs`"),
    **_row("return_full_text", "use `echo`"),
    **_row("return_prompt_token_ids", "use `return_token_ids`"),
    **_row("return_prompt_text return_token_offsets", "`/tokenize` returns them"),
    **_row("return_cached_tokens_details return_meta_info", "`usage` holds what is known"),
    **_row("return_hidden_states", "`/v1/completions` sends the state of the last token"),
    **_row("return_sampling_mask", "texts, ids and logprobs are reported"),
    **_row("return_routed_experts", "completions, chats and `/generate` report experts"),
    **_row("routed_experts_start_len routed_experts_prompt_start", "all tokens are reported", 0),
    **_only("detokenize", "answers are texts; `return_token_ids` adds ids", True),
    **_row("stream_interval", "the tokens of a step are one chunk", 1),
    # Other gateways' and engines', by what they have where nobody asks
    **_row("models provider route", _NO_CHOICE),
    **_row("transforms plugins include betas", "no such parts are on the way"),
    **_row("safe_mode safe_prompt enable_search disable_tool_validation", "say so in the prompt"),
    **_row("repeat_penalty", "`repetition_penalty` holds repetition back", 1),
    **_row("mirostat penalty_alpha top_a epsilon_cutoff eta_cutoff", "use `min_p` or `top_p`", 0),
    **_row("xtc_probability dry_multiplier dynatemp_range smoothing_factor", _NO_SEARCH, 0),
    **_row("tfs_z", "use `min_p` or `top_p`", 1),
    **_row("n_probs", "use `logprobs`", 0),
    **_only("id_slot", _NO_CHOICE, -1),
    **_row("reasoning_format", "use `separate_reasoning`", "parsed", "auto", "deepseek"),
    **_row("context_length_exceeded_behavior", "use `truncate_prompt_tokens`", "error"),
    # The caller, and the place where it runs
    **_row("skip_reading_prefix_cache", "`cache_salt` keeps apart what is cached"),
    **_row("custom_labels", "metrics are by adapter"),
    **_row("kv_transfer_params ec_transfer_params session_params", _NO_CHOICE),
    **_row("bootstrap_host bootstrap_port bootstrap_room", _NO_CHOICE),
    **_row("routed_dp_rank disagg_prefill_dp_rank data_parallel_rank", _NO_CHOICE),
    **_row("vllm_xargs extra_args ngram_corpus_id", "the engine has no such extensions"),
    # Adapters
    **_row("adapter_id lora_id lora_name lora_request", _MODEL),
    **_row("adapter_parameters", "use `merged_adapters`"),
    # Other inputs and outputs
    **_row("modalities", _TEXTS, ["text"]),
    **_row("image_data multi_modal_data multi_modal_uuids", "messages hold images"),
    **_row("mm_processor_kwargs", _CHAT),
    **_row("images_config media_io_kwargs", _IMAGES),
    **_row("min_dynamic_patch max_dynamic_patch", _IMAGES),
    **_row("audio web_search_options prompt_embeds use_audio_in_video", _INPUTS),
    **_row("embed_dtype", "numbers are float32", "float32"),
    **_row("endianness", "numbers are little-endian", "native", "little"),
    **_row("input_embeds audio_data video_data", _INPUTS),
    **_only("return_mm_kwargs", _TEXTS, True),
    **_row("suffix", "what follows a text is not read"),
    **_row("input_ids", "`/v1/completions` takes token ids as its `prompt`"),
    **_row("inputs text", "use `prompt`"),
    **_row("prompt", _COMPLETIONS),
    **_row("messages chat_template chat_template_kwargs documents", _CHAT),
    **_row("continue_final_message", _CHAT),
    **_only("add_generation_prompt", _CHAT, True),
    **_row("parameters sampling_params extra_body", _BESIDE),
}


def check_unknown(plain: dict[str, Any], known: Collection[str], harmless: Collection[str]) -> None:
    """Checks that a body has no field that would be silently lost. known: fields that are read.
    harmless: fields that change nothing. Raises RequestError.

    A field that other servers know may stand there if it asks for nothing; null is absent.
    """
    for name, value in plain.items():
        if value is None or name in known or name in harmless:
            continue
        field = ELSEWHERE.get(name)
        if field is None:
            raise unrecognised(name, [*known, *harmless])
        if not field.asks_for_nothing(value):
            raise unsupported(name, field.hint)


def check_refused(parts: dict[str, Any], refused: Mapping[str, Elsewhere], where: str = "") -> None:
    """Checks a route's fields that are not served. where: their parent. Raises RequestError."""
    for name, field in refused.items():
        if not field.asks_for_nothing(parts.get(name)):
            raise unsupported(f"{where}{name}", field.hint)


def without_refused(plain: dict[str, Any], refused: Mapping[str, Elsewhere]) -> dict[str, Any]:
    """Removes fields that are not served. Raises RequestError where they ask for something."""
    check_refused(plain, refused)
    return {name: value for name, value in plain.items() if name not in refused}


def check_unknown_parts(parts: dict[str, Any], known: Collection[str], where: str) -> None:
    """Checks an object inside the body. where: its name, with a dot. Raises RequestError."""
    for name, value in parts.items():
        if value is not None and name not in known:
            raise unrecognised(name, known, where)


def unsupported(name: str, hint: str) -> RequestError:
    """Makes the error for a field that is not served. hint: what to use, why not, or nothing."""
    if hint.startswith("use "):
        message = f"`{name}` is not known here: {hint}"
    else:
        message = f"`{name}` is not supported yet" + (f": {hint}" if hint else "")
    return RequestError("unsupported", message, param=name)


def unrecognised(name: str, known: Iterable[str], where: str = "") -> RequestError:
    """The error of a field that nobody knows, with the likely one. where: its parent."""
    shown = f"{where}{name}"[:_SHOWN]
    likely = nearest(name.replace("-", "_"), known)
    meant = f"; did you mean `{where}{likely}`?" if likely else ""
    message = f"Unrecognized request argument supplied: {shown}{meant}"
    return RequestError("unknown_parameter", message, param=shown)


# Other servers' names of fields -> their names here.
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_output_tokens": "max_tokens",
    "stop_sequences": "stop",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "random_seed": "seed",
    "rid": "request_id",
    "extra_key": "cache_salt",
    "no_stop_trim": "include_stop_str_in_output",
}


class Body(msgspec.Struct, frozen=True):
    """Base of the bodies of requests, with fields that a route knows but does not use. harmless:
    fields that change nothing, whatever they say. refused: fields of the route's API that are
    not served.
    """

    harmless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Elsewhere]] = {}


T = TypeVar("T", bound=Body)


def aliases_of(fields: Collection[str]) -> dict[str, str]:
    """Names that mean one of these fields and are none of them."""
    return {name: own for name, own in ALIASES.items() if own in fields and name not in fields}


def typed_by_aliases(plain: dict[str, Any], kind: type[T]) -> T:
    """The typed body. Fields that are neither known nor `kind.harmless` are refused unless they ask
    for nothing, and so are two names that say different things. Raises RequestError."""
    aliases = aliases_of(kind.__struct_fields__)
    found = {name: value for name, value in plain.items() if name not in aliases}
    spelled: dict[str, str] = {}
    for name, own in aliases.items():
        value = agreed({spelled.get(own, own): found.get(own), name: plain.get(name)})
        if value is not None and found.get(own) is None:
            found[own], spelled[own] = value, name
    check_unknown(found, kind.__struct_fields__, kind.harmless)
    try:
        return typed(found, kind)
    except RequestError as error:
        raise error.spelled(spelled) from None
