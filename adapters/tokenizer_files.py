"""Tokenizer files beside an adapter: a chat template is taken, with the special tokens that it is
written with; added tokens are refused. Pure.

Text is tokenised with the base's tokenizer, so an adapter may bring its own only if it has the
same ids. Trainers save it with every adapter; most of these files say nothing new.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from adapters.base import BaseSpec
from adapters.manifest import AdapterTemplate
from adapters.special_tokens import special_tokens
from adapters.strict_json import StrictJsonError, decode_object
from adapters.violations import Findings, shown

MAX_TEMPLATE_BYTES = 128 << 10
MAX_SPECIAL_TOKENS_BYTES = 16 << 10
MAX_TOKENIZER_ITEMS = 1_000_000
# Largest accepted size of each file that is looked at.
TOKENIZER_FILES: dict[str, int] = {
    "added_tokens.json": 4 << 20,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": 8 << 20,
}


class _AddedToken(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    """vocab: token -> id (BPE, WordPiece), or token and score of each id (Unigram)."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] | None = None


def read_tokenizer_files(
    files: Mapping[str, bytes], base: BaseSpec, findings: Findings
) -> AdapterTemplate | None:
    """The adapter's own chat template, if it brings one.

    files: those of `TOKENIZER_FILES` that the folder has, within their sizes. Tokens which the
    base's tokenizer does not have, and files that cannot be judged, are added to `findings`.
    """
    config = _object(files, "tokenizer_config.json", findings)
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        ids = [int(key) for key in listed if key.isascii() and key.isdigit() and len(key) < 10]
        _check_ids("tokenizer_config.json", ids, base, findings)
    added = _object(files, "added_tokens.json", findings)
    _check_ids("added_tokens.json", [i for i in added.values() if type(i) is int], base, findings)
    if "tokenizer.json" in files:
        _check_tokenizer(files["tokenizer.json"], base, findings)
    source = _chat_template(files.get("chat_template.jinja"), config, findings)
    return None if source is None else AdapterTemplate(source, _special_tokens(config, findings))


def _object(files: Mapping[str, bytes], name: str, findings: Findings) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return decode_object(files[name])
    except StrictJsonError as error:
        findings.add("bad_tokenizer_file", name, f"{name} is {error}")
        return {}


def _check_tokenizer(data: bytes, base: BaseSpec, findings: Findings) -> None:
    # Each token takes a colon or a bracket; counting bounds the memory that parsing takes.
    if max(data.count(b":"), data.count(b"[")) > MAX_TOKENIZER_ITEMS:
        message = f"tokenizer.json lists more than {MAX_TOKENIZER_ITEMS} things"
        findings.add("bad_tokenizer_file", "tokenizer.json", message)
        return
    try:
        tokenizer = msgspec.json.decode(data, type=_Tokenizer)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        message = f"tokenizer.json cannot be read: {shown(str(error))}"
        findings.add("bad_tokenizer_file", "tokenizer.json", message)
        return
    vocab = tokenizer.model.vocab
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token.id for token in tokenizer.added_tokens or ()]
    _check_ids("tokenizer.json", ids, base, findings)
    if base.num_tokens is not None and max(ids, default=-1) + 1 < base.num_tokens:
        message = f"tokenizer.json knows {max(ids, default=-1) + 1} ids, expected {base.num_tokens}"
        findings.add("other_tokenizer", "tokenizer.json", message)


def _check_ids(name: str, ids: list[int], base: BaseSpec, findings: Findings) -> None:
    """A base that was inferred may have no known vocabulary; then there is nothing to compare."""
    known = base.num_tokens if base.num_tokens is not None else base.vocab_size
    new = sorted({token for token in ids if token >= known}) if known else []
    if new:
        message = f"{name} adds tokens to the base's {known}: ids {shown(new[:8])}"
        findings.add("added_tokens", name, message)


def _chat_template(
    jinja: bytes | None, config: Mapping[str, Any], findings: Findings
) -> str | None:
    """`chat_template.jinja` comes before the config's; of several named ones, `default`."""
    if jinja is not None:
        try:
            return jinja.decode("utf-8")
        except UnicodeDecodeError:
            findings.add("bad_chat_template", "chat_template.jinja", "the template is not UTF-8")
            return None
    template = config.get("chat_template")
    if isinstance(template, list):
        default = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = default[0].get("template") if default else None
    if template is not None and not isinstance(template, str):
        message = f"chat_template: expected text, got {shown(template)}"
        findings.add("bad_chat_template", "tokenizer_config.json", message)
        return None
    if template is not None and len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        message = f"chat_template has more than {MAX_TEMPLATE_BYTES} bytes"
        findings.add("bad_chat_template", "tokenizer_config.json", message)
        return None
    return template.encode("utf-8", "replace").decode() if template else None


def _special_tokens(config: Mapping[str, Any], findings: Findings) -> dict[str, str | None]:
    try:
        tokens = special_tokens(config)
    except ValueError as error:
        findings.add("bad_tokenizer_file", "tokenizer_config.json", str(error))
        return {}
    if len(msgspec.json.encode(tokens)) > MAX_SPECIAL_TOKENS_BYTES:
        message = f"the special tokens have more than {MAX_SPECIAL_TOKENS_BYTES} bytes"
        findings.add("bad_tokenizer_file", "tokenizer_config.json", message)
    return tokens
