"""The model card: all that a router needs of a base model, read from its folder. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from adapters.special_tokens import special_tokens
from server.model.checkpoint import (
    GENERATION_FILE,
    CheckpointError,
    base_digest,
    read_config,
    read_json,
    read_optional_json,
)
from server.protocol import ModelCard

TOKENIZER_FILE = "tokenizer.json"
_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TEMPLATE_BYTES = 1 << 20
_SAMPLING_KEYS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
)


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
    settings = read_optional_json(folder / "tokenizer_config.json")
    return ModelCard(
        base_digest=base_digest(folder),
        names=names,
        tokenizer_json=_tokenizer(folder),
        chat_template=_chat_template(folder, settings),
        special_tokens=_special_tokens(folder, settings),
        eos_token_ids=config.eos_token_ids,
        vocab_size=config.vocab_size,
        max_context=min(max_context or config.max_context, config.max_context),
        dtype=dtype,
        device=device,
        max_lora_rank=max_lora_rank,
        created=created,
        sampling_defaults=_sampling_defaults(read_optional_json(folder / GENERATION_FILE)),
    )


def _read_text(path: Path, limit: int) -> str:
    try:
        if path.stat().st_size > limit:
            raise CheckpointError(f"{path}: larger than {limit} bytes")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def _tokenizer(folder: Path) -> str:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no {TOKENIZER_FILE}; a tokenizer of another form (tokenizer.model) is"
            " not supported: convert it with transformers' AutoTokenizer and save_pretrained"
        )
    text = _read_text(path, _MAX_TOKENIZER_BYTES)
    try:
        # Some are read, and then fail at any letter: no vocabulary, and no unknown token.
        tokenizers.Tokenizer.from_str(text).encode("a", add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: tokenizers {tokenizers.__version__} cannot use it ({error})"
        ) from None
    return text


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Newest form first: chat_template.jinja, chat_template.json, tokenizer_config.json."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return _read_text(jinja, _MAX_TEMPLATE_BYTES)
    own_file = folder / "chat_template.json"
    value = (read_json(own_file) if own_file.exists() else settings).get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    older = read_optional_json(folder / "special_tokens_map.json")
    try:
        tokens = special_tokens(older) | special_tokens(settings)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return {name: text for name, text in tokens.items() if text is not None}


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """What the model's authors advise; only where they advise sampling at all."""
    if not generation.get("do_sample", False):
        return {}
    values = {key: generation.get(key) for key in _SAMPLING_KEYS}
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
