"""Tokenizer files beside an adapter. A chat template is taken, with its special tokens, and so are
the tokens that end answers and those that are added. Pure.

Text is tokenised with the base's tokenizer and these tokens, so an adapter may bring its own only
if it has the same tokens otherwise. Trainers save it with every adapter; most of these files say
nothing new.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE, TEMPLATE_FILE
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.manifest import AdapterTemplate, AdapterText, OwnToken
from loraplex.adapters.peft.added_tokens import AddedTokens, listed_token
from loraplex.adapters.peft.own_ends import GENERATION_FILE, MAX_GENERATION_BYTES, own_ends
from loraplex.adapters.peft.special_tokens import special_tokens
from loraplex.adapters.violations import Findings, shown

MAX_TEMPLATE_BYTES = 128 << 10
MAX_SPECIAL_TOKENS_BYTES = 16 << 10
MAX_TOKENIZER_ITEMS = 1_000_000
# Largest accepted size of each file that is looked at.
TOKENIZER_FILES: dict[str, int] = {
    "added_tokens.json": 4 << 20,
    TEMPLATE_FILE: MAX_TEMPLATE_BYTES,
    GENERATION_FILE: MAX_GENERATION_BYTES,
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": 8 << 20,
}


class _ListedToken(msgspec.Struct):
    id: int
    content: str = ""
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class _Model(msgspec.Struct):
    """vocab: token -> id (BPE, WordPiece), or token and score of each id (Unigram)."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_ListedToken] | None = None


def read_tokenizer_files(
    files: Mapping[str, bytes], base: BaseSpec, findings: Findings
) -> AdapterText:
    """The adapter's own chat templates, if it brings any, and its own ends of an answer.

    files: those of `TOKENIZER_FILES` that the folder has, within their sizes. Tokens which cannot
    be served, and files that cannot be judged, are added to `findings`.
    """
    config = _object(files, "tokenizer_config.json", findings)
    added = _added_tokens(files, config, base, findings)
    if base.tokens:
        base = msgspec.structs.replace(base, tokens=base.tokens | {t.content: t.id for t in added})
    ends = own_ends(files.get(GENERATION_FILE), config, base, findings)
    sources = _chat_templates(files.get(TEMPLATE_FILE), config, findings)
    if not sources:
        return AdapterText(None, ends, added_tokens=added)
    special = _special_tokens(config, findings)
    _check_named("\n".join(sources.values()), special, base, findings)
    default = sources.pop(DEFAULT_TEMPLATE, None)
    return AdapterText(AdapterTemplate(default, special, sources), ends, added_tokens=added)


def _added_tokens(
    files: Mapping[str, bytes], config: Mapping[str, Any], base: BaseSpec, findings: Findings
) -> tuple[OwnToken, ...]:
    tokens = AddedTokens(base, findings)
    if "tokenizer.json" in files:
        _read_tokenizer(files["tokenizer.json"], base, tokens, findings)
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        numbered = [
            listed_token(int(key), token)
            for key, token in listed.items()
            if key.isascii() and key.isdigit() and len(key) < 10
        ]
        tokens.read("tokenizer_config.json", numbered)
    spelled = _object(files, "added_tokens.json", findings)
    by_text = [OwnToken(i, text) for text, i in spelled.items() if type(i) is int]
    tokens.read("added_tokens.json", by_text)
    return tokens.all()


def _object(files: Mapping[str, bytes], name: str, findings: Findings) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        return decode_object(files[name])
    except StrictJsonError as error:
        findings.add("bad_tokenizer_file", name, f"{name} is {error}")
        return {}


def _read_tokenizer(data: bytes, base: BaseSpec, found: AddedTokens, findings: Findings) -> None:
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
    by_text = vocab.items() if isinstance(vocab, dict) else ((t[0], i) for i, t in enumerate(vocab))
    added = [OwnToken(*msgspec.structs.astuple(token)) for token in tokenizer.added_tokens or ()]
    texts = {token.content: token.id for token in added}
    # The vocabulary may list what is added to it, too.
    vocabulary = [OwnToken(i, text) for text, i in by_text if texts.get(text) != i]
    found.read("tokenizer.json", vocabulary, may_add=False)
    found.read("tokenizer.json", added)
    size = max((token.id for token in (*vocabulary, *added)), default=-1) + 1
    if base.tokens and size < base.num_tokens:
        message = f"tokenizer.json knows {size} ids, expected {base.num_tokens}"
        findings.add("other_tokenizer", "tokenizer.json", message)


def _check_named(
    source: str, special: Mapping[str, str | None], base: BaseSpec, findings: Findings
) -> None:
    """What the template writes are tokens."""
    new = {
        text
        for name, text in special.items()
        if base.tokens and text and text not in base.tokens and (name in source or text in source)
    }
    if new:
        message = f"the chat template has tokens that the base has not: {shown(sorted(new)[:4])}"
        findings.add("added_tokens", "tokenizer_config.json", message)


def _chat_templates(
    jinja: bytes | None, config: Mapping[str, Any], findings: Findings
) -> dict[str, str]:
    """By name. `chat_template.jinja` comes before the config's, of which there may be several."""
    if jinja is not None:
        try:
            return {DEFAULT_TEMPLATE: jinja.decode("utf-8")}
        except UnicodeDecodeError:
            findings.add("bad_chat_template", TEMPLATE_FILE, "the template is not UTF-8")
            return {}
    value = config.get("chat_template")
    entries = value if isinstance(value, list) else [{"name": DEFAULT_TEMPLATE, "template": value}]
    named = [(t.get("name"), t.get("template")) for t in entries if isinstance(t, dict)]
    found = {}
    for name, template in named:
        if template is not None and not isinstance(template, str):
            message = f"chat_template: expected text, got {shown(template)}"
            findings.add("bad_chat_template", "tokenizer_config.json", message)
        elif template and isinstance(name, str):
            found[_well_formed(name)] = _well_formed(template)
    if sum(len(f"{name}{text}".encode()) for name, text in found.items()) > MAX_TEMPLATE_BYTES:
        message = f"chat_template has more than {MAX_TEMPLATE_BYTES} bytes"
        findings.add("bad_chat_template", "tokenizer_config.json", message)
        return {}
    return found


def _well_formed(text: str) -> str:
    """JSON can hold lone surrogates; frames cannot."""
    return text.encode("utf-8", "replace").decode()


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
