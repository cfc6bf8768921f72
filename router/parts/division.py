"""How the answers to one call are divided into text, reasoning and calls. Pure."""

from collections.abc import Callable

import msgspec

from loraplex.router.parts.parts import NOTHING, CallDelta, PartsDelta, PartsReader, ToolCall


class Division(msgspec.Struct, frozen=True):
    """How a model's answers are divided into parts. readers: each makes a reader for one answer.
    The text that a reader leaves goes to the next.

    markers: texts that the readers look for, among them special tokens. short_ids: calls have ids
    of Mistral's form. reasons: the first reader looks for reasoning, which precedes all text.
    """

    readers: tuple[Callable[[], PartsReader], ...]
    markers: frozenset[str] = frozenset()
    short_ids: bool = False
    reasons: bool = False


class DividedAnswer:
    """The parts of one answer as they come. new_id: makes the id of a call.

    hidden: markers that no client sees; what readers leave of them in the text is dropped.
    """

    def __init__(
        self, division: Division, new_id: Callable[[], str], hidden: frozenset[str] = frozenset()
    ) -> None:
        self._readers = [reader() for reader in division.readers]
        self._reasons = division.reasons
        self._fed = 0
        self._reasoned: int | None = None
        self._new_id = new_id
        self._hidden = tuple(sorted(hidden))
        self._reasoning: list[str] = []
        self._ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def reasoned(self) -> int:
        """Characters of the answer, from its begin on, that its reasoning and the markers of that
        have taken so far. Without reasoning there are none."""
        if not self._reasons or not self._reasoning:
            return 0
        return self._fed if self._reasoned is None else self._reasoned

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call_id, name, "".join(arguments))
            for call_id, name, arguments in zip(
                self._ids, self._names, self._arguments, strict=True
            )
        )

    def feed(self, text: str, *, is_last: bool) -> PartsDelta:
        """The additions of the next text to each part. is_last: no more text comes."""
        if not text and not is_last:
            return NOTHING
        reasoning, calls = "", list[CallDelta]()
        self._fed += len(text)
        for i, reader in enumerate(self._readers):
            parts = _read(reader, text, is_last)
            text = parts.text
            if i == 0 and text and self._reasoned is None:
                self._reasoned = self._fed - len(text)
            reasoning += parts.reasoning
            calls += parts.calls
        for marker in self._hidden:
            text = text.replace(marker, "")
            reasoning = reasoning.replace(marker, "")
        if reasoning:
            self._reasoning.append(reasoning)
        return PartsDelta(text, reasoning, tuple(map(self._known, calls)))

    def _known(self, delta: CallDelta) -> CallDelta:
        """The piece with its call's id, if it is the first."""
        if delta.name is None:
            self._arguments[delta.index].append(delta.arguments)
            return delta
        call_id = self._new_id()
        self._ids.append(call_id)
        self._names.append(delta.name)
        self._arguments.append([delta.arguments])
        return msgspec.structs.replace(delta, id=call_id)


def _read(reader: PartsReader, text: str, is_last: bool) -> PartsDelta:
    parts = reader.feed(text) if text else NOTHING
    if not is_last:
        return parts
    rest = reader.end()
    return PartsDelta(
        parts.text + rest.text, parts.reasoning + rest.reasoning, parts.calls + rest.calls
    )
