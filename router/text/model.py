"""A model's tokenizer and chat templates, from its card: text to ids, ids to text;
and the models of adapters that add tokens.

Thread-safe: encoding lets go of the interpreter, so long prompts belong in a thread.
"""

import copy
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec
from tokenizers import Encoding, Tokenizer

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR, REPLACEMENT, byte_of
from loraplex.adapters.chat.conversation import (
    DEFAULT_OPTIONS,
    MessageForm,
    Rendered,
    TemplateFault,
    TemplateOptions,
    choose_template,
)
from loraplex.adapters.chat.template import ChatTemplate
from loraplex.adapters.classes import OwnClasses
from loraplex.adapters.common.recent import Recent
from loraplex.adapters.manifest import AdapterManifest, OwnToken
from loraplex.router.call import GenerationCall, RequestError
from loraplex.router.text.detokenizer import Detokenizer, common_prefix
from loraplex.router.text.text_decoder import make_decoder
from loraplex.router.text.tokenizer_json import AddedToken, longest_token
from loraplex.router.text.turn_taking import CallersTurns, TurnTaking
from loraplex.server.protocol import ModelCard

# Beside which a token's own text is found. Some decoders drop what repeats the token before.
_ANCHORS = ("a", "b", "c")

# A large tokenizer takes some 100 MB.
MAX_MODELS = 8

# Added tokens, and the size of a table that is smaller than the base's.
_Key = tuple[tuple[OwnToken, ...], int]


def template_error(fault: TemplateFault) -> RequestError:
    """The error that a caller gets."""
    return RequestError(fault.cause, str(fault), param=fault.param)


class BaseTemplates:
    """The base's chat templates by name. faults: why some fail, which fails their chats alone."""

    def __init__(self, card: ModelCard) -> None:
        self._model = card.names[0]
        self._templates: dict[str, ChatTemplate] = {}
        self.faults: dict[str, str] = {}
        for name, source in card.all_templates.items():
            form = card.message_forms.get(name)
            try:
                self._templates[name] = ChatTemplate(source, card.special_tokens, form)
            except TemplateFault as fault:
                self.faults[name] = str(fault)

    def __len__(self) -> int:
        """Counts the templates that can be used."""
        return len(self._templates)

    @property
    def forms(self) -> dict[str, MessageForm]:
        """How each template reads messages."""
        return {name: template.form for name, template in self._templates.items()}

    def render(
        self, messages: Collection[Mapping[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS
    ) -> Rendered:
        """The prompt. messages: as `shaped` takes them. Raises RequestError (template_error,
        unsupported, invalid)."""
        if not self._templates and not self.faults:
            raise RequestError(
                "unsupported", f"{self._model} has no chat template: use /v1/completions"
            )
        try:
            names = self._templates.keys() | self.faults
            name = choose_template(names, options.template, options.tools is not None)
            if name in self.faults:
                raise TemplateFault(self.faults[name])
            return self._templates[name].written(messages, options)
        except TemplateFault as fault:
            raise template_error(fault) from fault


class TokenSpan(msgspec.Struct, frozen=True, gc=False):
    """A token of a text. start, stop: characters of the text that it covers."""

    id: int
    text: str
    start: int
    stop: int


class TextModel:
    """The text side of one base model, or of an adapter that adds tokens. It is the streams'
    Vocabulary.

    card: of an adapter, with its tokens. base_card: of the base. turns: in which work on it is done
    that may take long. templates: of chats.
    Raises ValueError when the card's tokenizer cannot be read.
    """

    def __init__(self, card: ModelCard, base_card: ModelCard | None = None) -> None:
        self.card = card
        self.base_card = base_card or card
        self.turns = TurnTaking().of("")
        try:
            self._tokenizer = Tokenizer.from_str(card.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"the tokenizer of {card.names[0]} cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = card.split_special_tokens
        try:
            self._decoder = make_decoder(_decoder_of(self._tokenizer))
        except ValueError as error:
            raise ValueError(f"the tokenizer of {card.names[0]} cannot be used: {error}") from error
        self._added = self._tokenizer.get_added_tokens_decoder()
        # As the library: a token is special by how it is spelled, whatever its id.
        self._special = frozenset(t.content for t in self._added.values() if t.special)
        self._longest_token = longest_token(card.tokenizer_json)
        self._prefix = self._find_prefix()
        self._tokens: dict[int, str | None] = {}
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self.templates = BaseTemplates(card)

    def under(self, own: OwnClasses) -> "TextModel":
        """The same model under an adapter with a score head of its own."""
        other = copy.copy(self)
        other.card = self.card.with_head(own)
        return other

    def taking(self, turns: CallersTurns) -> "TextModel":
        """The same model for one caller, whose turns its work takes."""
        other = copy.copy(self)
        other.turns = turns
        return other

    # Text to ids

    def check_size(self, text: str, param: str) -> None:
        """Refuses, before any work, a text that no tokenization could fit into the context. Raises
        RequestError (context_length)."""
        if self._longest_token is None:
            return
        limit = self._longest_token * self.card.max_context
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
        encoding = self._encoding(self._tokenizer.encode_batch_fast, text, add_special_tokens)
        ids: list[int] = encoding.ids
        return ids[self._repeated(ids) :] if add_special_tokens else ids

    def encode_pair(self, text: str, other: str) -> tuple[list[int], int | None]:
        """Token ids of two texts as one, with what the tokenizer puts around and between them; and
        the place of the first that it marks as of the second text, None = it marks none.
        """
        encoding = self._encoding(self._tokenizer.encode_batch_fast, (text, other), True)
        types = encoding.type_ids
        marks = self.card.token_types > 1 and 1 in types
        return encoding.ids, types.index(1) if marks else None

    def encode_parts(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        """Token ids of a text, and the part of the text that each stands for: together all of it. A
        character of several tokens is the last one's."""
        encoding = self._encoding(self._tokenizer.encode_batch, text, add_special_tokens)
        starts = [start if start < stop else len(text) for start, stop in encoding.offsets]
        next_starts = list(accumulate(reversed(starts), min))[-2::-1] + [len(text)]
        parts, begin = [], 0
        for (_, stop), next_start in zip(encoding.offsets, next_starts, strict=False):
            end = max(begin, min(stop, next_start))
            parts.append(text[begin:end])
            begin = end
        if parts:
            parts[-1] += text[begin:]
        repeated = self._repeated(encoding.ids) if add_special_tokens else 0
        return encoding.ids[repeated:], parts[repeated:]

    def spans(self, text: str, add_special_tokens: bool) -> Iterator[TokenSpan]:
        """Tokens of a text with the characters that they cover, as `/tokenize` lists them."""
        encoding = self._encoding(self._tokenizer.encode_batch, text, add_special_tokens)
        ids = encoding.ids
        repeated = self._repeated(ids) if add_special_tokens else 0
        return (self._span(text, encoding, i, ids[i]) for i in range(repeated, len(ids)))

    def _encoding(
        self,
        encode_batch: Callable[..., list[Encoding]],
        text: str | tuple[str, str],
        add_special_tokens: bool,
    ) -> Encoding:
        """Encode a text, or a pair. encode_batch: of the library's ways to encode, the batched ones
        alone release the interpreter's lock. Raises RequestError where the library fails: at a
        letter without an unknown token, say. It also panics at some texts.
        """
        try:
            return encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:  # a panic is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            message = f"the model's tokenizer cannot read this text: {str(error)[:200]}"
            raise RequestError("invalid", message) from None

    def _span(self, text: str, encoding: Encoding, index: int, token_id: int) -> TokenSpan:
        """Finds a token's place in a text. `encoding.offsets` is not used: one list of all offsets
        holds up other threads.
        """
        start, stop = encoding.token_to_chars(index) or (0, 0)
        return TokenSpan(token_id, text[start:stop] or self._spelled(token_id), start, stop)

    # Ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; exactly what a stream of them adds up to."""
        return "".join(self.decode_parts(ids, skip_special_tokens))

    def decode_parts(self, ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
        """Decodes ids. The same in parts, one for each id. What comes late is with the token that
        completes it; what is left at the end is the last token's.
        """
        detokenizer = Detokenizer(self, self._decoder.copy(), skip_special_tokens)
        parts = [detokenizer.push(token_id) for token_id in ids]
        if parts:
            parts[-1] += detokenizer.flush()
        return parts

    def detokenizer(self, prompt: Sequence[int], call: GenerationCall) -> Detokenizer:
        """Makes a detokenizer for answers to a prompt of these ids, as the call wants its text."""
        detokenizer = Detokenizer(
            self,
            self._decoder.copy(),
            call.skip_special_tokens,
            call.spaces_between_special_tokens,
        )
        detokenizer.read_prompt(prompt)
        return detokenizer

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for ids that stand for nothing."""
        if token_id not in self._tokens:
            if not self.has_token(token_id):
                return None
            self._tokens[token_id] = self._tokenizer.id_to_token(token_id)
        return self._tokens[token_id]

    def added_tokens(self) -> dict[int, AddedToken]:
        """Tokens that were added to the vocabulary, by id."""
        names = AddedToken.__struct_fields__
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: AddedToken(*(getattr(t, name) for name in names)) for i, t in added.items()}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of a text without special tokens."""
        return self.token(token_id) in self._special

    def special_ids(self, texts: Collection[str]) -> dict[str, int]:
        """Special tokens among the texts, with their ids."""
        special = self._special.intersection(texts)
        return {text: i for text in special if (i := self._tokenizer.token_to_id(text)) is not None}

    def is_added(self, token_id: int) -> bool:
        return token_id in self._added

    def token_text(self, token_id: int) -> str:
        """The text that the token adds inside a text; "" for unknown ids."""
        text = self._texts.get(token_id)
        if text is None:
            token = self.token(token_id)
            if token is None:
                return ""
            text = self._texts[token_id] = self._text_of(token)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The token's text in bytes: of a part of a character, too."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.token(token_id)
            if token is None:
                return b""
            data = self._bytes[token_id] = self._bytes_of(token_id, token)
        return data

    @property
    def new_vocab_size(self) -> int | None:
        """The size of a vocabulary beyond the base's, else None, as of `GenerateRequest`."""
        size = self.card.vocab_size
        return size if size > self.base_card.vocab_size else None

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < self.card.vocab_size

    def _spelled(self, token_id: int) -> str:
        """The spelling of a token that was added around a text, and covers none of it."""
        return self.token_text(token_id) if self.is_special(token_id) else ""

    def _text_of(self, token: str) -> str:
        """The text of a token between two other tokens."""
        before, after = _other_than(token)
        start = self._decode_all(before)
        whole = self._decode_all(before, token, after)
        end = self._decode_all(before, after)[len(start) :]
        return whole[common_prefix(start, whole) :].removesuffix(end)

    def _decode_all(self, *tokens: str) -> str:
        decoder = self._decoder.copy()
        return "".join(map(decoder.push, tokens)) + decoder.flush()

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        text = self.token_text(token_id)
        if REPLACEMENT in text:
            byte = byte_of(token)
            if byte is not None:
                return bytes((byte,))
            if all(character in BYTE_OF_CHAR for character in token):
                return bytes(BYTE_OF_CHAR[character] for character in token)
        return text.encode()

    def _repeated(self, ids: Sequence[int]) -> int:
        """Counts the tokens before a text that it begins with itself: all of them, or 0."""
        size = len(self._prefix)
        return size if tuple(ids[size : 2 * size]) == self._prefix else 0

    def _find_prefix(self) -> tuple[int, ...]:
        """Ids that the tokenizer puts before every text, if any."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        return tuple(encoding.ids[: added.index(0)]) if 0 in added else ()


def _decoder_of(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The tokenizer's decoder as the library writes it, whichever form the file has."""
    if tokenizer.decoder is None:
        return None
    document: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return document


def _other_than(token: str) -> tuple[str, str]:
    """Two plain tokens to stand beside a token."""
    before, after = [letter for letter in _ANCHORS if letter != token][:2]
    return before, after


class AdapterModels:
    """Text models of adapters: made at the first use, in turn, and kept while in use."""

    def __init__(self) -> None:
        self._kept: Recent[_Key, TextModel] = Recent(MAX_MODELS)

    async def of(self, base: TextModel, manifest: AdapterManifest | None) -> TextModel:
        """The text model of an adapter. The base's own for adapters that change nothing of it.

        Raises RequestError (adapter_invalid) for tokens that the library gives other ids.
        """
        if manifest is None or not (manifest.added_tokens or manifest.table_size):
            return base
        key = manifest.added_tokens, manifest.table_size
        found = self._known(base, key)
        if found is None:
            # As a text that is too large for another beside it: one is made at a time.
            found = await base.turns.run_apart("text", sys.maxsize, partial(self._made, base, key))
        return found.taking(base.turns)

    def _made(self, base: TextModel, key: _Key) -> TextModel:
        """Makes the model of an adapter's tokens, or finds it. Raises as `of`."""
        found = self._known(base, key)  # another may have waited for the same
        if found is None:
            found = _made(base, *key)
            self._kept.put(key, found)
        return found

    def _known(self, base: TextModel, key: _Key) -> TextModel | None:
        found = self._kept.get(key)
        return None if found is None or found.base_card is not base.card else found


def _made(base: TextModel, added: Sequence[OwnToken], table_size: int) -> TextModel:
    card = base.card
    own = msgspec.structs.replace(
        card,
        tokenizer_json=_with_tokens(card, added),
        vocab_size=table_size or card.vocab_size,
    )
    try:
        model = TextModel(own, card)
    except ValueError as error:
        raise RequestError("adapter_invalid", str(error)) from error
    known = model.added_tokens()
    for token in added:
        if token.id not in known or known[token.id].content != token.content:
            message = f"the base's tokenizer cannot have {token.content!r} as token {token.id}"
            raise RequestError("adapter_invalid", message)
    return model


def _with_tokens(card: ModelCard, added: Sequence[OwnToken]) -> str:
    """The tokenizer's file with more tokens."""
    if not added:
        return card.tokenizer_json
    document = json.loads(card.tokenizer_json)
    tokens = [{name: getattr(each, name) for name in OwnToken.__struct_fields__} for each in added]
    document["added_tokens"] = [*(document.get("added_tokens") or ()), *tokens]
    return json.dumps(document)
