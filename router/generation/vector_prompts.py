"""Texts that are read for vectors or classes, as token ids: with what is put before them, whole or
cut.

Runs on the event loop; long texts are encoded in threads.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from loraplex.router.call import GenerationCall, RequestError, VectorCall
from loraplex.router.generation.prompts import Prompt, check_ids, check_size, input_field
from loraplex.router.text.model import TextModel
from loraplex.server.protocol import ModelCard, VectorForm

T = TypeVar("T")
# What sentence-transformers calls the prompts of the two texts of a pair.
QUERY, DOCUMENT = "query", "document"


async def vector_prompts(
    call: GenerationCall, vector: VectorCall, model: TextModel
) -> list[Prompt]:
    """Makes the prompts of texts, in order. Raises RequestError (invalid, context_length)."""
    form = model.card.vectors
    before = "" if form is None else prompt_before(vector, form)
    most = model.card.max_context if form is None else form.max_tokens
    reader = TextReader(call, model, most)
    size = sum(len(prompt) + len(before) for prompt in call.prompts)

    def read() -> list[Prompt]:
        return [
            reader.prompt(prompt, before, reader.field(i)) for i, prompt in enumerate(call.prompts)
        ]

    return await model.turns.run(size, read)


async def class_prompts(call: GenerationCall, model: TextModel) -> list[Prompt]:
    """Makes the prompts of texts for a classifier. It raises as `vector_prompts` does."""
    reader = TextReader(call, model, model.card.max_context)
    size = sum(map(len, call.prompts))
    classes = model.card.classes
    of_tokens = classes is not None and classes.of_tokens

    def read() -> list[Prompt]:
        fields = [(text, reader.field(i)) for i, text in enumerate(call.prompts)]
        if of_tokens:
            return [reader.with_spans(text, field) for text, field in fields]
        return [unpadded(reader.prompt(text, "", field), model) for text, field in fields]

    return await model.turns.run(size, read)


async def paired_vector_prompts(
    call: GenerationCall, vector: VectorCall, form: VectorForm, model: TextModel
) -> list[Prompt]:
    """Prompts of queries (one, where all are the same), then of documents. Each is read alone."""
    reader = TextReader(call, model, form.max_tokens)
    queries = queries_of(vector)
    texts = [
        *((query, form.prompts.get(QUERY, ""), "query") for query in queries),
        *(
            (document, form.prompts.get(DOCUMENT, ""), reader.field(i))
            for i, document in enumerate(call.prompts)
        ),
    ]
    size = sum(len(text) + len(before) for text, before, _ in texts)
    return await model.turns.run(size, lambda: [reader.prompt(*text) for text in texts])


def queries_of(vector: VectorCall) -> Sequence[str]:
    """Lists the queries of a call: one where all are the same."""
    return vector.queries[:1] if len(set(vector.queries)) == 1 else vector.queries


def prompt_before(vector: VectorCall, form: VectorForm) -> str:
    """Finds the text that goes before each text of the request. Raises RequestError."""
    if vector.prompt is not None:
        return vector.prompt
    if vector.prompt_names:
        found = (form.prompts[name] for name in vector.prompt_names if name in form.prompts)
        return next(found, "")
    name = form.default_prompt if vector.prompt_name is None else vector.prompt_name
    if name is None:
        return ""
    if name not in form.prompts:
        known = ", ".join(map(repr, form.prompts)) or "none"
        message = f"`prompt_name`: the model has no prompt {name[:60]!r}; it has: {known}"
        raise RequestError("invalid", message, param="prompt_name")
    return form.prompts[name]


def unbound_prompts(call: GenerationCall, card: ModelCard) -> tuple[str, ...]:
    """Fields that named a prompt that the model's files have not."""
    names = () if call.vector is None else call.vector.prompt_names
    known = () if card.vectors is None else card.vectors.prompts
    return ("input_type",) if names and not any(name in known for name in names) else ()


def unpadded(prompt: Prompt, model: TextModel) -> Prompt:
    """Removes padding from a prompt's end: a classifier judges the last token before that."""
    classes = model.card.classes
    pad, ids = None if classes is None else classes.pad_token_id, prompt.ids
    end = len(ids)
    while end > 1 and ids[end - 1] == pad:
        end -= 1
    return prompt if end == len(ids) else msgspec.structs.replace(prompt, ids=ids[:end])


class TextReader:
    """Tokenises the texts of one call. most: tokens of a text."""

    def __init__(self, call: GenerationCall, model: TextModel, most: int) -> None:
        self._call, self._model = call, model
        self.most = most
        if call.truncate is not None and call.truncate >= 0:
            self.most = min(call.truncate, most)

    def field(self, index: int) -> str:
        """The name of a prompt's field, with its index where there are several."""
        call = self._call
        field = input_field(call) if call.messages is None else "messages"
        return field if len(self._call.prompts) == 1 else f"{field}[{index}]"

    def prompt(self, prompt: str | list[int], before: str, field: str) -> Prompt:
        """Makes a prompt of at most `most` tokens from a text or ids. Raises RequestError."""
        if not isinstance(prompt, str):
            check_ids(prompt, self._model, field)
            return self.checked("", self._cut(prompt, len(prompt), 0), field)
        text = before + prompt
        self.check_size(text, field)
        ids = self._model.encode(text, self._call.add_special_tokens)
        return self.checked(text, self._fitted(text, ids, ids), field)

    def with_spans(self, prompt: str | list[int], field: str) -> Prompt:
        """Makes a prompt as `prompt` does, with the characters of each token of a text."""
        if not isinstance(prompt, str):
            return self.prompt(prompt, "", field)
        self.check_size(prompt, field)
        found = list(self._model.spans(prompt, self._call.add_special_tokens))
        kept = self._fitted(prompt, found, [span.id for span in found])
        checked = self.checked(prompt, [span.id for span in kept], field)
        return msgspec.structs.replace(checked, spans=[(span.start, span.stop) for span in kept])

    def check_size(self, text: str, field: str) -> None:
        check_size(self._call, self._model, text, field)

    def checked(self, text: str, ids: list[int], field: str) -> Prompt:
        """Makes a prompt whose count of tokens is checked. Raises RequestError."""
        if not ids:
            raise RequestError("invalid", "expected a text of at least one token", param=field)
        if len(ids) > self.most:
            message = f"the model reads texts of at most {self.most} tokens; got {len(ids)}"
            raise RequestError("context_length", message, param=field)
        return Prompt(text, ids, ())

    def _fitted(self, text: str, tokens: list[T], ids: list[int]) -> list[T]:
        """Cuts a text's tokens to what the model reads, if the call says so. ids: theirs."""
        if self._call.truncate is None or len(ids) <= self.most:
            return tokens
        return self._cut(tokens, *self._inside(text, ids))

    def _inside(self, text: str, ids: list[int]) -> tuple[int, int]:
        """Finds where the text's own tokens end, and how many come before them: what a tokenizer
        puts around a text stays when the text is cut.
        """
        own = self._model.encode(text, add_special_tokens=False)
        places = range(len(ids) - len(own) + 1)
        before = next((i for i in places if ids[i : i + len(own)] == own), 0)
        return (before + len(own), before) if len(own) < len(ids) else (len(ids), 0)

    def _cut(self, ids: list[T], end: int, begin: int) -> list[T]:
        """Cuts ids to what the model reads, if the call says so, between `begin` and `end`."""
        if self._call.truncate is None or len(ids) <= self.most:
            return ids
        room = max(0, self.most - begin - (len(ids) - end))
        inside = ids[begin:end]
        kept = inside[:room] if self._call.truncate_keeps == "first" else inside[-room:]
        return [*ids[:begin], *(kept if room else ()), *ids[end:]][: self.most]
