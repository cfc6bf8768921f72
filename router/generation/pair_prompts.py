"""A query and a document as one prompt, as a reranker reads them.

Runs on the event loop; long texts are encoded in threads.
"""

import msgspec

from loraplex.router.call import GenerationCall, RequestError, VectorCall
from loraplex.router.generation.prompts import Prompt
from loraplex.router.generation.vector_prompts import TextReader, unpadded
from loraplex.router.text.model import TextModel
from loraplex.server.protocol import PairForm

_DOCUMENT = "{document}"


async def pair_prompts(
    call: GenerationCall, vector: VectorCall, form: PairForm, model: TextModel
) -> list[Prompt]:
    """Makes a prompt for each document with its query. Raises RequestError (invalid,
    context_length).
    """
    if vector.instruction is not None and "{instruction}" not in form.template:
        message = "`instruction`: the model's prompt has no place for one"
        raise RequestError("invalid", message, param="instruction")
    reader = _PairReader(call, vector, form, model)
    queries = sum(map(len, vector.queries)) + len(form.template) * len(call.prompts)
    size = sum(map(len, call.prompts)) + queries
    return await model.turns.run(size, reader.all)


class _PairReader(TextReader):
    def __init__(
        self, call: GenerationCall, vector: VectorCall, form: PairForm, model: TextModel
    ) -> None:
        super().__init__(call, model, model.card.max_context)
        self._vector, self._form = vector, form

    def all(self) -> list[Prompt]:
        """Makes the prompts of all pairs of a query and a document. Raises RequestError."""
        pairs = zip(self._vector.queries, self._call.prompts, strict=True)
        return [self._pair(i, query, str(document)) for i, (query, document) in enumerate(pairs)]

    def _pair(self, index: int, query: str, document: str) -> Prompt:
        field = self.field(index)
        self.check_size(document, field)
        self.check_size(query, "query")
        document = self._shortened(document)
        before, after = self._around(query)
        second = None
        if self._form.template:
            ids = self._model.encode(before + document + after, add_special_tokens=False)
            tail = len(self._model.encode(after, add_special_tokens=False)) if after else 0
        else:
            ids, second = self._model.encode_pair(query, document)
            own = self._model.encode(document, add_special_tokens=False)
            tail = _behind(ids, own)
        if self._call.truncate is not None and len(ids) > self.most:
            room = self.most - tail
            ids = [*ids[: max(0, room)], *(ids[len(ids) - tail :] if tail else ())]
        second = None if second is None else min(second, len(ids))
        prompt = msgspec.structs.replace(self.checked("", ids, field), second=second)
        return unpadded(prompt, self._model)

    def _shortened(self, document: str) -> str:
        most = self._vector.max_document_tokens
        if most is None:
            return document
        ids = self._model.encode(document, add_special_tokens=False)
        return document if len(ids) <= most else self._model.decode(ids[:most])

    def _around(self, query: str) -> tuple[str, str]:
        """Texts before the document and behind the document."""
        asked = self._vector.instruction
        values = {
            "{instruction}": self._form.instruction if asked is None else asked,
            "{query}": query,
        }
        before, _, after = self._form.template.partition(_DOCUMENT)
        return _filled(before, values), _filled(after, values)


def _filled(text: str, values: dict[str, str]) -> str:
    """Fills a text: each name is replaced by its value. Names within a value stay as they are."""
    for name, value in values.items():
        head, found, tail = text.partition(name)
        if found:
            others = {other: said for other, said in values.items() if other != name}
            return f"{_filled(head, others)}{value}{_filled(tail, others)}"
    return text


def _behind(ids: list[int], own: list[int]) -> int:
    """Counts how many tokens follow the last occurrence of these."""
    for end in range(len(ids), len(own) - 1, -1):
        if ids[end - len(own) : end] == own:
            return len(ids) - end
    return 0
