"""The reasoning that a model writes before its answer. Pure."""

import msgspec

from router.parts.parts import PartsReader
from router.parts.scan import Scan, Steps, StepsReader

_NEWLINES = "\r\n"


class Reasoning(msgspec.Struct, frozen=True):
    """How a family of models marks its reasoning. opens, closes: spellings that models use.

    The first of each is what templates write.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return self.opens + self.closes

    def begun(self, prompt: str) -> bool:
        """Whether the prompt has opened the reasoning, so that the answer begins inside."""
        return prompt.rstrip().endswith(self.opens)

    def reader(self, begun: bool = False) -> PartsReader:
        """begun: the answer begins inside the reasoning."""
        return StepsReader(lambda scan: self._steps(scan, begun))

    def _steps(self, scan: Scan, begun: bool) -> Steps[None]:
        """Reasoning stands at the answer's begin. Newlines beside markers belong to no part."""
        yield from scan.spaces()
        opened = yield from scan.one_of(self.opens)
        if not opened and not begun:
            return
        if opened:
            yield from _drop_newlines(scan)
        elif scan.start < scan.at:
            yield from _back_to_first_line(scan)
        if (yield from scan.until(self.closes, scan.reasoning, _NEWLINES)):
            yield from _drop_newlines(scan)


def _drop_newlines(scan: Scan) -> Steps[None]:
    while (yield from scan.peek()) and scan.buffer[scan.at] in _NEWLINES:
        scan.at += 1
    scan.drop()


def _back_to_first_line(scan: Scan) -> Steps[None]:
    """Of the space that was read only leading newlines are dropped."""
    scan.at = scan.start
    yield from _drop_newlines(scan)


_FAMILIES = (
    # DeepSeek-R1, Qwen 3, GLM 4.5, OLMo 3 and most others
    Reasoning("think", ("<think>",), ("</think>",)),
    Reasoning("mistral", ("[THINK]",), ("[/THINK]",)),
    Reasoning(
        "granite",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
    Reasoning("seed", ("<seed:think>",), ("</seed:think>",)),
    Reasoning("cohere", ("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    Reasoning("thinking", ("<thinking>",), ("</thinking>",)),
    Reasoning("reasoning", ("<reasoning>",), ("</reasoning>",)),
)
REASONING = {family.name: family for family in _FAMILIES}


def detect_reasoning(template_source: str) -> Reasoning | None:
    """The family whose markers a chat template writes or strips from earlier turns."""
    for family in _FAMILIES:
        if any(close in template_source for close in family.closes):
            return family
    return None
