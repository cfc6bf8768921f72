"""Two readers in a row. Pure."""

from router.parts.parts import Parts, PartsReader


class ChainedReader:
    """What the first reader takes for text, the second divides further."""

    def __init__(self, first: PartsReader, second: PartsReader) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> Parts:
        return self._pass_on(self._first.feed(text))

    def end(self) -> Parts:
        rest = self._pass_on(self._first.end())
        return joined(rest, self._second.end())

    def _pass_on(self, parts: Parts) -> Parts:
        if not parts.text:
            return parts
        divided = self._second.feed(parts.text)
        return joined(Parts("", parts.reasoning, parts.calls), divided)


def joined(first: Parts, second: Parts) -> Parts:
    return Parts(
        first.text + second.text,
        first.reasoning + second.reasoning,
        first.calls + second.calls,
    )
