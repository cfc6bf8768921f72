"""Texts that are read for vectors, as token ids: with what is put before them, whole or cut.

Runs on the event loop; long texts are encoded in threads.
"""

from router.call import GenerationCall, RequestError, VectorCall
from router.generation.prompts import MAX_ENCODED, Prompt, check_ids, input_field
from router.text.model import TextModel
from server.protocol import VectorForm


async def vector_prompts(
    call: GenerationCall, vector: VectorCall, form: VectorForm, model: TextModel
) -> list[Prompt]:
    """In order. Raises RequestError (invalid, context_length)."""
    before = _before(vector, form)
    size = sum(len(prompt) + len(before) for prompt in call.prompts)
    builder = _Builder(call, form, model)
    return await model.long_texts.run(
        size, lambda: [builder.prompt(i, prompt, before) for i, prompt in enumerate(call.prompts)]
    )


def _before(vector: VectorCall, form: VectorForm) -> str:
    """What is put before each text. Raises RequestError."""
    if vector.prompt is not None:
        return vector.prompt
    name = form.default_prompt if vector.prompt_name is None else vector.prompt_name
    if name is None:
        return ""
    if name not in form.prompts:
        known = ", ".join(map(repr, form.prompts)) or "none"
        message = f"`prompt_name`: the model has no prompt {name[:60]!r}; it has: {known}"
        raise RequestError("invalid", message, param="prompt_name")
    return form.prompts[name]


class _Builder:
    def __init__(self, call: GenerationCall, form: VectorForm, model: TextModel) -> None:
        self._call, self._model = call, model
        self._most = form.max_tokens
        if call.truncate is not None and call.truncate >= 0:
            self._most = min(call.truncate, form.max_tokens)

    def prompt(self, index: int, prompt: str | list[int], before: str) -> Prompt:
        if not isinstance(prompt, str):
            check_ids(prompt, self._model, self._field(index))
            return self._prompt(index, "", self._cut(prompt, len(prompt), 0))
        text = before + prompt
        if self._call.truncate is None:
            self._model.check_size(text, self._field(index))
        elif len(text) > MAX_ENCODED:
            message = f"expected a text of at most {MAX_ENCODED} characters, got {len(text)}"
            raise RequestError("context_length", message, param=self._field(index))
        ids = self._model.encode(text, self._call.add_special_tokens)
        if self._call.truncate is not None and len(ids) > self._most:
            ids = self._cut(ids, *self._inside(text, ids))
        return self._prompt(index, text, ids)

    def _inside(self, text: str, ids: list[int]) -> tuple[int, int]:
        """Where the text's own tokens end, and how many come before them: what a tokenizer puts
        around a text stays when the text is cut."""
        own = self._model.encode(text, add_special_tokens=False)
        before = next(
            (i for i in range(len(ids) - len(own) + 1) if ids[i : i + len(own)] == own), 0
        )
        return (before + len(own), before) if len(own) < len(ids) else (len(ids), 0)

    def _cut(self, ids: list[int], end: int, begin: int) -> list[int]:
        """begin, end: of the tokens that may go."""
        if self._call.truncate is None or len(ids) <= self._most:
            return ids
        room = max(0, self._most - begin - (len(ids) - end))
        inside = ids[begin:end]
        kept = inside[:room] if self._call.truncate_keeps == "first" else inside[-room:]
        return [*ids[:begin], *(kept if room else ()), *ids[end:]][: self._most]

    def _prompt(self, index: int, text: str, ids: list[int]) -> Prompt:
        if not ids:
            message = "expected a text of at least one token"
            raise RequestError("invalid", message, param=self._field(index))
        if len(ids) > self._most:
            raise RequestError(
                "context_length",
                f"the model reads texts of at most {self._most} tokens; got {len(ids)}",
                param=self._field(index),
            )
        return Prompt(text, ids, ())

    def _field(self, index: int) -> str:
        field = input_field(self._call.api)
        return field if len(self._call.prompts) == 1 else f"{field}[{index}]"
