"""Chooses the files that make an adapter, and reads those of its tokenizer. Pure.

Files are chosen by name and size, before any is fetched. Text is tokenised with the base's
tokenizer and the added tokens. So all other tokens must be the base's. Trainers save a tokenizer
with every adapter; most of these files say nothing new. The tokens that close a template's turn are
found where templates are rendered.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.chat.conversation import DEFAULT_TEMPLATE, TEMPLATE_FILE
from loraplex.adapters.classes import OwnClasses, activation_said, labels_said, pad_said
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.errors import AdapterError, Findings, invalid, shown
from loraplex.adapters.manifest import AdapterTemplate, AdapterText, ListedToken, OwnToken
from loraplex.adapters.peft.config import CONFIG_FILE, MAX_CONFIG_BYTES
from loraplex.adapters.peft.lora_tensors import OwnScores
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.safetensors.header import (
    INDEX_FILES,
    MAX_INDEX_BYTES,
    MAX_SHARDS,
    WEIGHTS_FILE,
    check_shards,
    is_shard,
    parse_index,
)

_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# In the order in which transformers adds those that a tokenizer does not have.
USUAL_TOKENS = tuple(f"{kind}_token" for kind in _KINDS)
GENERATION_FILE = "generation_config.json"
MAX_GENERATION_BYTES = 1 << 20
MAX_ENDS = 64
MAX_ADDED_TOKENS = 4096
MAX_ADDED_BYTES = 128 << 10
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

MAX_NAMED = 4
_STEP = re.compile(r"checkpoint-(?P<step>[0-9]{1,12})")
CLASSES_FILE = "config.json"
MAX_CLASSES_BYTES = 1 << 20
# The weights in mlx-lm's format, which is not read.
MLX_FILE = "adapters.safetensors"
# Largest accepted size of each file that may stand beside config and weights.
SIDE_FILES: dict[str, int] = {**TOKENIZER_FILES, CLASSES_FILE: MAX_CLASSES_BYTES}
_CONVERT = "`loraplex adapter convert FOLDER --out OUT` makes a safetensors adapter of it"
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def listed_token(token_id: int, entry: object) -> OwnToken:
    """Reads an entry of `added_tokens_decoder`; a malformed one has no text."""
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    content = fields.get("content")
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return OwnToken(
        token_id,
        content if isinstance(content, str) else "",
        **{name: fields.get(name) is True for name in flags},
    )


class AddedTokens:
    """Collects added tokens from files, from the most detailed file first.

    Each new token has the next free id behind the base's. Other ids are another tokenizer's.
    """

    def __init__(self, base: BaseSpec, findings: Findings) -> None:
        self._base, self._findings = base, findings
        self._found: dict[int, OwnToken] = {}
        self._by_text: dict[str, int] = {}

    def read(self, name: str, tokens: Iterable[OwnToken], *, may_add: bool = True) -> None:
        """Checks the tokens of one file: each must be the base's, or a new one.

        name: of the file. may_add: whether the file may add tokens. Texts are compared where the
        base's are known, else ids alone.
        """
        known, size = self._base.tokens, self._base.num_tokens
        wrong: list[tuple[int, str]] = []
        beyond: list[int] = []
        for token in tokens:
            there = known.get(token.content) if known else None
            if there == token.id if known else token.id < size or not size:
                continue
            if known and may_add and there is None and size <= token.id < self._base.most_ids:
                if not self._take(token):
                    wrong.append((token.id, token.content))
            elif token.id >= size and there is None:
                beyond.append(token.id)
            else:
                wrong.append((token.id, token.content))
        if beyond:
            self._refuse(name, sorted(set(beyond)))
        elif wrong:
            message = f"{name} has other tokens than the base: {shown(sorted(wrong)[:4])}"
            self._findings.add("other_tokenizer", name, message)

    def _take(self, token: OwnToken) -> bool:
        """Adds a token. Whether it is new, or agrees with an earlier file."""
        before = self._found.setdefault(token.id, token)
        same_id = self._by_text.setdefault(token.content, token.id)
        return bool(token.content) and before.content == token.content and same_id == token.id

    def _refuse(self, name: str, ids: list[int]) -> None:
        size, most = self._base.num_tokens, self._base.most_ids
        served = f"; ids {size} to {most - 1} are served"
        message = f"{name} adds tokens to the base's {size}: ids {shown(ids[:8])}{served}"
        self._findings.add("added_tokens", name, message)

    def all(self) -> tuple[OwnToken, ...]:
        """Lists all added tokens by id, and checks that they have no gap and are not too many."""
        found = tuple(token for _, token in sorted(self._found.items()))
        size, where = self._base.num_tokens, "tokenizer.json"
        if found and [token.id for token in found] != [*range(size, size + len(found))]:
            ids = shown([token.id for token in found][:8])
            message = f"added tokens have the ids {ids}, and not those from {size} on without a gap"
            self._findings.add("added_tokens", where, message)
        nbytes = sum(len(token.content.encode("utf-8", "replace")) for token in found)
        if len(found) > MAX_ADDED_TOKENS or nbytes > MAX_ADDED_BYTES:
            most = f"at most {MAX_ADDED_TOKENS} of {MAX_ADDED_BYTES} bytes together are served"
            message = f"{len(found)} tokens of {nbytes} bytes are added; {most}"
            self._findings.add("added_tokens", where, message)
        return found


class _Model(msgspec.Struct):
    """The part of a tokenizer's JSON that has its vocabulary. vocab: token -> id (BPE, WordPiece),
    or token and score of each id (Unigram).
    """

    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[ListedToken] | None = None


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
    """Checks that the special tokens in a template are the base's tokens."""
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
    """Reads templates by name; `chat_template.jinja` replaces those of the config."""
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


def own_ends(
    generation: bytes | None, settings: Mapping[str, Any], base: BaseSpec, findings: Findings
) -> tuple[int, ...]:
    """Lists ids that end an adapter's answer and are no ends of the base, ascending.

    generation: `generation_config.json`, of which `eos_token_id` alone is read. settings:
    `tokenizer_config.json`, of which `eos_token` is; a text that is no token of the base ends
    nothing. An inferred base has no known ends to compare with.
    """
    named = _of_generation(generation, base, findings)
    text = end_token_of(settings)
    if text is not None and base.tokens and text in base.tokens:
        named.add(base.tokens[text])
    own = sorted(named.difference(base.eos_token_ids))
    if len(own) > MAX_ENDS:
        message = f"{len(own)} tokens are named as ends of an answer; at most {MAX_ENDS} may be"
        findings.add("bad_generation_config", GENERATION_FILE, message)
    return () if base.is_inferred else tuple(own)


def end_token_of(settings: Mapping[str, Any]) -> str | None:
    """The text of `eos_token`, if the file names one that can be read."""
    named = {name: settings[name] for name in ("eos_token",) if name in settings}
    try:
        return special_tokens(named).get("eos_token") or None
    except ValueError:
        return None


def _of_generation(data: bytes | None, base: BaseSpec, findings: Findings) -> set[int]:
    if data is None:
        return set()
    try:
        value = decode_object(data).get("eos_token_id")
    except StrictJsonError as error:
        findings.add("bad_generation_config", GENERATION_FILE, f"{GENERATION_FILE} is {error}")
        return set()
    ids = value if isinstance(value, list) else [] if value is None else [value]
    most = base.most_ids if base.vocab_size else 1 << 31  # of an inferred base it may be unknown
    if all(type(i) is int and 0 <= i < most for i in ids):
        return set(ids)
    message = f"eos_token_id: expected ids from 0 to {most - 1}, got {shown(value)}"
    findings.add("bad_generation_config", GENERATION_FILE, message)
    return set()


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Reads each special token's text by its name; None = there is no such token. Raises ValueError
    for a token that is neither text nor an object with `content`."""
    named = {
        key: value
        for key, value in settings.items()
        if key in USUAL_TOKENS or (key.endswith("_token") and isinstance(value, str))
    }
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):  # a list has no names
        named |= extra
    return {_well_formed(name): _text(name, value) for name, value in named.items()}


def _text(name: str, value: object) -> str | None:
    if isinstance(value, dict):  # an AddedToken
        value = value.get("content", value)
    if value is None:
        return None
    if isinstance(value, str):
        return _well_formed(value)
    raise ValueError(f"special token {shown(name)}: expected text, got {shown(value)}")


def _well_formed(text: str) -> str:
    """Replaces lone surrogates in a text: JSON can hold them, frames cannot."""
    return text.encode("utf-8", "replace").decode()


def is_unsafe(name: str) -> bool:
    """Whether the name is that of a pickle: refused when it stands in for weights, never opened."""
    return name.lower().endswith(_UNSAFE_SUFFIXES)


def is_relevant(name: str) -> bool:
    """Whether it says something of the adapter, be it only why it is refused."""
    known = (CONFIG_FILE, WEIGHTS_FILE, MLX_FILE, *INDEX_FILES)
    return name in known or name in SIDE_FILES or is_shard(name) or is_unsafe(name)


def weight_files(names: Iterable[str]) -> tuple[str, ...]:
    """Lists the files that hold the weights; several count only with an index. PEFT reads the one
    file; transformers, too, where there is one."""
    there = set(names)
    if WEIGHTS_FILE in there:
        return (WEIGHTS_FILE,)
    return tuple(sorted(filter(is_shard, there))) if there.intersection(INDEX_FILES) else ()


def index_file(names: Iterable[str]) -> str | None:
    """The index that counts; None where the weights are one file, or none."""
    there = set(names)
    if WEIGHTS_FILE in there or not weight_files(there):
        return None
    return next(filter(there.__contains__, INDEX_FILES))


def small_files(
    listing: Mapping[str, int],
    limits: AdapterLimits,
    findings: Findings,
    place: str = "",
    nearby: Callable[[], Sequence[str]] = tuple,
) -> tuple[str, ...]:
    """The files to look at before the weights: those that are there and not too large.

    listing: name -> bytes. place: the folder or repository, as messages may name it. nearby: names
    of folders in it that are adapters, asked for where it is none itself. What is missing or too
    large is added to `findings`. Raises AdapterError `too_large` when the files together exceed the
    limit, and `invalid` for an adapter in mlx-lm's format.
    """
    if CONFIG_FILE not in listing:
        meant = did_you_mean(place, nearby())
        findings.add("missing_file", CONFIG_FILE, f"there is no {CONFIG_FILE}{meant}")
    _check_weight_files(listing, findings)
    index = index_file(listing)
    allowed = {CONFIG_FILE: MAX_CONFIG_BYTES, **SIDE_FILES}
    allowed |= {} if index is None else {index: MAX_INDEX_BYTES}
    small: list[str] = []
    for name, most in allowed.items():
        if listing.get(name, 0) > most:
            message = f"{name} has {listing[name]} bytes; at most {most} are read"
            findings.add("file_too_large", name, message)
        elif name in listing:
            small.append(name)
    check_bytes(fetched_bytes(listing), limits)
    return tuple(small)


def read_index(
    small: Mapping[str, bytes], listing: Mapping[str, int], findings: Findings
) -> dict[str, str] | None:
    """Tensor -> the file that holds it. None: the weights are in one file, or the index is wrong.
    small: name -> bytes of the files other than the weights."""
    name, before = index_file(listing), len(findings)
    if name is None or name not in small:
        return None
    index = parse_index(small[name], name, findings)
    if index is not None:
        check_shards(index, weight_files(listing), findings)
    return index if len(findings) == before else None


def _check_weight_files(listing: Mapping[str, int], findings: Findings) -> None:
    found = weight_files(listing)
    if len(found) > MAX_SHARDS:
        message = f"the weights are in {len(found)} files; at most {MAX_SHARDS} are read"
        findings.add("too_many_files", found[-1], message)
    if found:
        return
    unsafe = sorted(filter(is_unsafe, listing))
    if INDEX_FILES[0] in listing:
        message = "the weights are in several files, of which none is there beside the index"
        findings.add("missing_file", WEIGHTS_FILE, message)
    elif any(map(is_shard, listing)):
        message = f"the weights are in several files, without an index, {INDEX_FILES[0]}"
        findings.add("missing_file", INDEX_FILES[0], message)
    elif unsafe:
        message = f"the weights are a pickle, which is never opened; {_CONVERT}"
        findings.add("unsafe_format", unsafe[0], message)
    elif MLX_FILE in listing:
        message = f"the weights are in mlx-lm's format, which is not served; {_CONVERT}"
        # Its config has none of PEFT's keys: to list them would hide the one reason.
        raise invalid("missing_file", MLX_FILE, message)
    else:
        findings.add("missing_file", WEIGHTS_FILE, f"there is no {WEIGHTS_FILE}")


def check_bytes(total: int, limits: AdapterLimits) -> None:
    """Checks the bytes of all files together. Raises AdapterError `too_large`."""
    if total > limits.max_bytes:
        message = f"the adapter has {total} bytes; at most {limits.max_bytes} are accepted"
        raise AdapterError("too_large", message)


def fetched_bytes(listing: Mapping[str, int]) -> int:
    fetched = {CONFIG_FILE, *SIDE_FILES, index_file(listing), *weight_files(listing)}
    return sum(size for name, size in listing.items() if name in fetched)


def read_classes(
    data: bytes | None, head: OwnScores, base: BaseSpec, findings: Findings
) -> OwnClasses:
    """Reads label names from the model's `config.json`."""
    count, of_tokens = head.labels.shape[0], head.of_tokens
    if data is None:
        return OwnClasses(count, of_tokens=of_tokens)

    def refuse(words: str) -> None:
        findings.add("bad_value", CLASSES_FILE, f"{CLASSES_FILE}: {words}")

    try:
        config = decode_object(data)
    except StrictJsonError as error:
        findings.add("bad_config", CLASSES_FILE, f"{CLASSES_FILE} is {error}")
        return OwnClasses(count, of_tokens=of_tokens)
    labels = labels_said(config, refuse)
    if labels and len(labels) != count:
        words = f"id2label names {len(labels)} labels; {head.labels.name} has {count}"
        findings.add("labels_mismatch", CLASSES_FILE, f"{CLASSES_FILE}: {words}")
    vocab_size = None if base.is_inferred else base.vocab_size
    said = activation_said(config, refuse), pad_said(config, vocab_size)
    return OwnClasses(count, labels, *said, of_tokens)


def is_checkpoint(name: str) -> bool:
    """Whether a trainer names a checkpoint so."""
    return _STEP.fullmatch(name) is not None


def newest_first(names: Iterable[str]) -> list[str]:
    """Sorts checkpoints by falling step, then all others by name."""
    return sorted(names, key=lambda name: (-_step(name), name))


def did_you_mean(place: str, names: Sequence[str]) -> str:
    """Ends a refusal of `place` with the adapters in it. names: of their folders."""
    meant = [_joined(place.rstrip("/"), name) for name in newest_first(names)[:MAX_NAMED]]
    if not meant:
        return ""
    more = len(names) - len(meant)
    rest = f" (and {more} more)" if more else ""
    return f"; did you mean {' or '.join(meant)}{rest}?"


def _joined(place: str, name: str) -> str:
    beside = name.removeprefix("../")
    if beside == name:
        return f"{place}/{name}"
    start = max(place.rfind("/"), place.rfind(":")) + 1
    return f"{place[:start]}{beside}"


def _step(name: str) -> int:
    found = _STEP.fullmatch(name.rpartition("/")[2])
    return int(found["step"]) if found else -1
