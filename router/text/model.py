"""A model's tokenizer and chat template, from its card: text to ids, ids to bytes.

Thread-safe: encoding lets go of the interpreter, so long prompts belong in a thread.
"""

import re
from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from router.generation import RequestError
from router.text.long_texts import LongTexts
from router.text.templates import BaseTemplates
from router.text.tokenizer_json import BYTE_OF_CHAR, read_facts
from server.protocol import ModelCard

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "�"


class TokenSpan(msgspec.Struct, frozen=True, gc=False):
    """A token of a text. start, stop: characters of the text that it covers."""

    id: int
    text: str
    start: int
    stop: int


class TextModel:
    """The text side of one base model. It is the streams' Vocabulary.

    long_texts: where work on it is done that may take long. templates: of chats.
    Raises ValueError when the card's tokenizer cannot be read.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.long_texts = LongTexts()
        self.eos_token_ids = frozenset(card.eos_token_ids)
        try:
            self._tokenizer = Tokenizer.from_str(card.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"the tokenizer of {card.names[0]} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(
            [i for i, token in added.items() if token.special] + list(card.eos_token_ids)
        )
        self._facts = read_facts(card.tokenizer_json)
        self._anchor = self._find_anchor()
        self._prefix = self._find_prefix()
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self.templates = BaseTemplates(card)

    # Text to ids

    def check_size(self, text: str, param: str) -> None:
        """Refuses, before any work, a text that no tokenization could fit into the context.

        Raises RequestError (context_length).
        """
        if self._facts.longest_token is None:
            return
        limit = self._facts.longest_token * self.card.max_context
        if len(text) > limit:
            raise RequestError(
                "context_length",
                f"the model's context is {self.card.max_context} tokens; a text of {len(text)} "
                "characters is longer than that in any tokenization",
                param=param,
            )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        add_special_tokens: with the tokens that the tokenizer puts around a text. Those before it
        are left out where the text begins with them: a rendered chat has its BOS already.
        """
        # Of the library's ways to encode, the batched ones alone release the interpreter's lock.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids[self._repeated(ids) :] if add_special_tokens else ids

    def spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]:
        """Tokens of a text with the characters that they cover, as `/tokenize` lists them."""
        batch = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        encoding = batch[0]
        spans = [
            TokenSpan(i, text[start:stop] or self.token_text(i), start, stop)
            for i, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]
        return spans[self._repeated(encoding.ids) :] if add_special_tokens else spans

    # Ids to text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out; exactly what a stream of them adds up to."""
        data = b"".join(map(self.token_bytes, ids))
        return data.decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        """The token by itself as it stands inside a text; special tokens spelled out."""
        text = self._texts.get(token_id)
        if text is None:
            if not self.has_token(token_id):
                return ""
            text = self._texts[token_id] = self._text_of(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, b"" for special and unknown ids."""
        data = self._bytes.get(token_id)
        if data is None:
            if not self.has_token(token_id):
                return b""
            data = self._bytes[token_id] = self._bytes_of(token_id)
        return data

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < self.card.vocab_size

    def _text_of(self, token_id: int) -> str:
        """Between two anchors, where decoders neither strip spaces nor join."""
        anchors = self._anchor
        edge = self._tokenizer.decode(anchors, skip_special_tokens=False)
        inside = [*anchors, token_id, *anchors]
        text: str = self._tokenizer.decode(inside, skip_special_tokens=False)
        if text.startswith(edge) and text.endswith(edge) and len(text) >= 2 * len(edge):
            return text[len(edge) : len(text) - len(edge)]
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special:
            return b""
        text = self.token_text(token_id)
        if _REPLACEMENT in text:
            raw = self._raw_bytes(self._tokenizer.id_to_token(token_id) or "")
            if raw is not None:
                return raw
        return text.encode()

    def _raw_bytes(self, token: str) -> bytes | None:
        """Bytes of a token that is no text by itself."""
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
        if self._facts.byte_level and all(c in BYTE_OF_CHAR for c in token):
            return bytes(BYTE_OF_CHAR[c] for c in token)
        return None

    def _repeated(self, ids: Sequence[int]) -> int:
        """How many of the tokens that were put before a text the text itself begins with: all of
        them, or 0."""
        size = len(self._prefix)
        return size if tuple(ids[size : 2 * size]) == self._prefix else 0

    def _find_prefix(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text, if anything."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        return tuple(encoding.ids[: added.index(0)]) if 0 in added else ()

    def _find_anchor(self) -> list[int]:
        """A token that is one plain letter, whatever stands beside it."""
        for letter in "axe0":
            ids = self.encode(letter, add_special_tokens=False)[-1:]
            if ids and self._tokenizer.decode(ids).strip() == letter:
                return ids
        return []
