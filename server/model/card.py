"""The model card: all that a router needs of a base model, read from its folder. No torch."""

from pathlib import Path

from adapters.special_tokens import special_tokens
from server.model.base_tokenizer import read_tokenizer, special_token_settings
from server.model.checkpoint import (
    GENERATION_FILE,
    CheckpointError,
    base_digest,
    read_config,
    read_optional_json,
    read_text,
)
from server.protocol import ModelCard

_MAX_TEMPLATE_BYTES = 1 << 20
_ABOVE_ZERO = {"top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1e3}
_FROM_ZERO = {"temperature": 1e4, "top_k": 2.0**31 - 1, "min_p": 1.0}


def model_card(
    folder: Path,
    *,
    names: tuple[str, ...],
    dtype: str,
    device: str,
    max_lora_rank: int,
    max_context: int | None = None,
    created: int = 0,
) -> ModelCard:
    """The card of the model in `folder`.

    max_context: the worker's limit, where it is less than the model's. created: Unix seconds.
    Raises CheckpointError when the model or its tokenizer cannot be served.
    """
    config = read_config(folder)
    return ModelCard(
        base_digest=base_digest(folder),
        names=names,
        tokenizer_json=read_tokenizer(folder)[1],
        chat_template=_chat_template(folder),
        special_tokens=_special_tokens(folder),
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
        max_context=min(max_context or config.max_context, config.max_context),
        dtype=dtype,
        device=device,
        max_lora_rank=max_lora_rank,
        created=created,
        sampling_defaults=_sampling_defaults(folder),
    )


def _chat_template(folder: Path) -> str | None:
    """Of chat_template.jinja, tokenizer_config.json or, which is a processor's, chat_template.json:
    of the first that has one."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return read_text(jinja, _MAX_TEMPLATE_BYTES)
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_optional_json(folder / name).get("chat_template")
        if isinstance(value, list):  # several named templates
            value = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        if isinstance(value, dict):
            value = value.get("default")
        if isinstance(value, str):
            return value
    return None


def _special_tokens(folder: Path) -> dict[str, str]:
    tokens = special_tokens(special_token_settings(folder))
    return {name: text for name, text in tokens.items() if text is not None}


def _sampling_defaults(folder: Path) -> dict[str, float]:
    """What the model's authors advise; only where they advise sampling at all."""
    generation = read_optional_json(folder / GENERATION_FILE)
    if not generation.get("do_sample", False):
        return {}
    advice = {}
    for key, most in (_ABOVE_ZERO | _FROM_ZERO).items():
        value = generation.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if key == "top_k" and value == -1:  # all tokens, as in other engines
            value = 0
        if not 0 <= value <= most or (value == 0 and key in _ABOVE_ZERO):
            expected = f"{'more than' if key in _ABOVE_ZERO else 'at least'} 0, at most {most:g}"
            raise CheckpointError(f"{folder / GENERATION_FILE}: {key} must be {expected}: {value}")
        advice[key] = float(value)
    return advice
