"""The model card: all that a router needs of a base model, read from its folder. No torch."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from adapters.chat.conversation import (
    DEFAULT_TEMPLATE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    MessageForm,
    TemplateFault,
    listed_templates,
)
from adapters.chat.template import ChatTemplate
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
    config, (_, tokenizer_json) = read_config(folder), read_tokenizer(folder)
    templates, special_tokens = _chat_templates(folder), _special_tokens(folder)
    return ModelCard(
        base_digest=base_digest(folder),
        names=names,
        tokenizer_json=tokenizer_json,
        chat_template=templates.get(DEFAULT_TEMPLATE),
        special_tokens=special_tokens,
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
        max_context=min(max_context or config.max_context, config.max_context),
        dtype=dtype,
        device=device,
        max_lora_rank=max_lora_rank,
        created=created,
        sampling_defaults=_sampling_defaults(folder),
        named_templates={n: text for n, text in templates.items() if n != DEFAULT_TEMPLATE},
        message_forms=_message_forms(templates, special_tokens),
    )


def _chat_templates(folder: Path) -> dict[str, str]:
    """By name. Files of their own come first, as in transformers; then tokenizer_config.json, and
    chat_template.json, which is a processor's: the first that has any."""
    files = {DEFAULT_TEMPLATE: folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    found = {
        name: read_text(path, _MAX_TEMPLATE_BYTES) for name, path in files.items() if path.exists()
    }
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = found or listed_templates(read_optional_json(folder / name).get("chat_template"))
    return found


def _message_forms(
    templates: Mapping[str, str], special_tokens: dict[str, str]
) -> dict[str, MessageForm]:
    """Of those that can be used: a router tells what is wrong with the others."""
    forms = {}
    for name, source in templates.items():
        with contextlib.suppress(TemplateFault):
            forms[name] = ChatTemplate(source, special_tokens).form
    return forms


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
