"""A model's tokens as llguidance reads them: by their bytes."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from llguidance import LLTokenizer

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR, byte_of, clean_up

Change = Callable[[str], str]


class VocabularyError(ValueError):
    """No grammar can be held to with this tokenizer; str() says why."""


class KnownTokens(NamedTuple):
    """A model's tokens, as grammars need them. by_id: bytes of all ids of the model. end_ids:
    tokens that llguidance allows where a grammar may end. specials: texts of the tokens that are
    no text in an answer, ends among them, by id.
    """

    by_id: list[bytes]
    end_ids: tuple[int, ...]
    specials: dict[int, bytes]


class Vocabulary(NamedTuple):
    """A model's vocabulary in the form that llguidance takes. tokenizer: shared by all matchers."""

    tokenizer: LLTokenizer
    tokens: KnownTokens

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.tokens.end_ids


class _TokenList:
    """A tokenizer with the attributes that LLTokenizer reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, by_id: list[bytes], specials: Sequence[int], end_id: int) -> None:
        self.tokens = by_id
        self.special_token_ids = specials
        self.eos_token_id = end_id
        self.greedy: Callable[[str], list[int]] = lambda text: []

    def __call__(self, text: str) -> list[int]:
        """Tokens of text that a grammar forces: the longest at each place."""
        return self.greedy(text)


def make_vocabulary(tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """Calls `read_tokens` and `vocabulary_of`, which take about a second for 128k tokens."""
    return vocabulary_of(read_tokens(tokenizer_json, vocab_size, end_ids))


def read_tokens(tokenizer_json: str, vocab_size: int, end_ids: Sequence[int]) -> KnownTokens:
    """Reads a model's tokens from its tokenizer. vocab_size: of the model, at least one more than
    its highest token id.

    end_ids: the model's end tokens. Special tokens and ends are no text: a grammar names them as
    `<[id]>`. Raises VocabularyError.
    """
    ends = tuple(sorted({i for i in end_ids if 0 <= i < vocab_size}))
    if not ends:
        raise VocabularyError("the model has no end token, so no answer could end")
    try:
        by_id, specials = token_bytes(tokenizer_json, vocab_size)
    except UnknownBytes as error:
        raise VocabularyError(str(error)) from None
    return KnownTokens(by_id, ends, {i: by_id[i] for i in sorted({*specials, *ends})})


def vocabulary_of(tokens: KnownTokens) -> Vocabulary:
    """Makes llguidance's vocabulary from a model's tokens. Raises VocabularyError."""
    wrapped = _TokenList(tokens.by_id, sorted(tokens.specials), tokens.end_ids[0])
    try:
        tokenizer = LLTokenizer(wrapped, eos_token=list(tokens.end_ids))  # type: ignore[arg-type]
    except ValueError as error:
        raise VocabularyError(f"llguidance cannot use the tokenizer: {error}") from None
    wrapped.greedy = tokenizer.greedy_tokenize
    return Vocabulary(tokenizer, tokens)


class UnknownBytes(ValueError):
    """The bytes of this tokenizer's tokens cannot be known one token at a time."""


class TokenBytes(NamedTuple):
    """The bytes of every token id. by_id: b"" for ids that stand for nothing. specials: ids,
    ascending, with names for bytes.
    """

    by_id: list[bytes]
    specials: list[int]


def token_bytes(tokenizer_json: str, vocab_size: int) -> TokenBytes:
    """Reads from a tokenizer's JSON which bytes each token stands for. vocab_size: of the model;
    the tokenizer may have fewer tokens. Raises UnknownBytes.
    """
    try:
        document = json.loads(tokenizer_json)
        spelled = _spelled(document["model"])
        added = {int(t["id"]): t for t in document.get("added_tokens") or ()}
        read = _reader(list(_flat(document.get("decoder"))))
    except UnknownBytes:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnknownBytes(f"the tokenizer's JSON cannot be read: {error!r}") from None
    by_id = [b""] * vocab_size
    for token_id, text in spelled:
        if 0 <= token_id < vocab_size:
            by_id[token_id] = read(text)
    specials = []
    for token_id, token in sorted(added.items()):
        if 0 <= token_id < vocab_size:
            special = bool(token.get("special"))
            by_id[token_id] = token["content"].encode() if special else read(token["content"])
            specials += [token_id] if special else []
    return TokenBytes(by_id, specials)


def _spelled(model: dict[str, Any]) -> list[tuple[int, str]]:
    """Yields ids and tokens. A Unigram model lists its tokens; others name the id of each."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return [(token_id, token) for token, token_id in vocabulary.items()]
    return [(token_id, token) for token_id, (token, _) in enumerate(vocabulary)]


def _flat(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _flat(part)
    else:
        yield decoder


def _reader(parts: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Chooses the function from a token that follows others to its bytes."""
    changes: list[Change] = []
    ending: Callable[[str], bytes] = str.encode
    fused = False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif fused:
            _check_fused(part)
        elif kind == "ByteLevel":
            ending, fused = _byte_level, True
        elif kind == "ByteFallback":
            ending = _byte_fallback
        else:
            changes.append(_change(part))
    if not parts:
        changes.append(" {}".format)  # without a decoder tokens are joined by spaces

    def read(token: str) -> bytes:
        if ending is _byte_fallback and (byte := byte_of(token)) is not None:
            return bytes((byte,))
        for change in changes:
            token = change(token)
        return ending(token)

    return read


def _check_fused(part: dict[str, Any]) -> None:
    """Refuses most steps on the whole text: the text's start alone says nothing of later tokens."""
    if part["type"] == "Strip" and not part.get("stop"):
        return
    raise UnknownBytes(f"its decoder applies {part['type']} to whole texts")


def _byte_level(token: str) -> bytes:
    if all(character in BYTE_OF_CHAR for character in token):
        return bytes(BYTE_OF_CHAR[character] for character in token)
    return token.encode()


def _byte_fallback(token: str) -> bytes:
    return token.encode()


def _change(part: dict[str, Any]) -> Change:
    kind = part["type"]
    if kind == "Replace" and "String" in part["pattern"]:
        pattern, content = part["pattern"]["String"], part["content"]
        return lambda token: token.replace(pattern, content)
    if kind == "Metaspace":
        space = part.get("replacement", "▁")
        return lambda token: token.replace(space, " ")
    if kind == "WordPiece":
        return _word_piece(part.get("prefix", "##"), part.get("cleanup", True))
    if kind == "Strip":
        return _strip(part.get("content", " "), part.get("start", 0), part.get("stop", 0))
    raise UnknownBytes(f"what its decoder's {kind} makes of a token depends on other tokens")


def _word_piece(prefix: str, cleanup: bool) -> Change:
    def change(token: str) -> str:
        token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        return clean_up(token) if cleanup else token

    return change


def _strip(content: str, start: int, stop: int) -> Change:
    """Makes a change that strips a text from a token. At most `start` and `stop` times `content`
    goes from its ends."""

    def change(token: str) -> str:
        bare = token.lstrip(content)
        token = token[min(len(token) - len(bare), start) :]
        bare = token.rstrip(content)
        return token[: len(token) - min(len(token) - len(bare), stop)]

    return change
