"""The chat templates of a base's folder, and the special tokens that they are written with."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.adapters.chat.conversation import (
    DEFAULT_TEMPLATE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TemplateFault,
    listed_templates,
)
from loraplex.adapters.chat.template import ChatTemplate
from loraplex.adapters.peft.files import special_tokens
from loraplex.server.model.checkpoint.checkpoint import read_optional_json, read_text

_MAX_TEMPLATE_BYTES = 1 << 20


def chat_templates(folder: Path) -> dict[str, str]:
    """Read a model's chat templates, by name. Files of their own come first, as in transformers;
    then tokenizer_config.json, and chat_template.json, which is a processor's: the first that
    has any.
    """
    files = {DEFAULT_TEMPLATE: folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    found = {
        name: read_text(path, _MAX_TEMPLATE_BYTES) for name, path in files.items() if path.exists()
    }
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = found or listed_templates(read_optional_json(folder / name).get("chat_template"))
    return found


def template_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that a template may use. settings: `special_token_settings`."""
    tokens = special_tokens(settings)
    return {name: text for name, text in tokens.items() if text is not None}


def usable_templates(sources: Mapping[str, str], tokens: dict[str, str]) -> dict[str, ChatTemplate]:
    """Templates that can be compiled; a router says what is wrong with the others."""
    found = {}
    for name, source in sources.items():
        with contextlib.suppress(TemplateFault):
            found[name] = ChatTemplate(source, tokens)
    return found
