"""The reasoning that a model writes before its answer. Pure."""

import msgspec

from loraplex.router.parts.parts import PartsReader, Scan, Steps, StepsReader

_NEWLINES = "\r\n"
# Tokens of gpt-oss.
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL, RETURN)


class Reasoning(msgspec.Struct, frozen=True):
    """How a family of models marks its reasoning. opens, closes: spellings that models use.

    The first of each is what templates write. header: what stands before the answer, and turn:
    what stands before that if there was reasoning. footer: what may stand behind the answer.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    turn: str = ""
    header: str = ""
    footer: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return self.opens + self.closes

    def shown_by(self, template_source: str) -> bool:
        """Whether a template writes the markers, or strips them from earlier turns."""
        return any(close in template_source for close in self.closes)

    def begun(self, prompt: str) -> bool:
        """Whether the prompt has opened the reasoning, so that the answer begins inside."""
        return prompt.rstrip().endswith(self.opens)

    def reader(self, begun: bool = False) -> PartsReader:
        """A reader of reasoning and answer. begun: the answer begins inside the reasoning."""
        return StepsReader(lambda scan: self._steps(scan, begun))

    def _steps(self, scan: Scan, begun: bool) -> Steps[None]:
        """Divides reasoning, which comes first. Newlines beside markers are of no part."""
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
            if self.turn and (yield from scan.literal(self.turn)):
                yield from _drop_newlines(scan)
                yield from scan.until((self.footer,), scan.text, _NEWLINES)
                scan.drop()


def _drop_newlines(scan: Scan) -> Steps[None]:
    while (yield from scan.peek()) and scan.buffer[scan.at] in _NEWLINES:
        scan.at += 1
    scan.drop()


def _back_to_first_line(scan: Scan) -> Steps[None]:
    """Drop the leading newlines of the space that was read, and nothing else."""
    scan.at = scan.start
    yield from _drop_newlines(scan)


class _Response(Reasoning, frozen=True):
    """Granite 3.3: the answer behind reasoning stands between `turn` and `footer`."""

    def shown_by(self, template_source: str) -> bool:
        return super().shown_by(template_source) and self.footer in template_source


class Channels(Reasoning, frozen=True):
    """An answer in messages, each of a channel. Those of `analysis` are reasoning. Those with a
    recipient are calls, which stay as they are; of others the text is the answer's."""

    @property
    def markers(self) -> tuple[str, ...]:
        return TOKENS

    def shown_by(self, template_source: str) -> bool:
        return self.opens[0] in template_source

    def _steps(self, scan: Scan, begun: bool) -> Steps[None]:
        if begun:
            yield from self._reasoning(scan)
        elif not (yield from self._addressed_at_once(scan)):
            scan.at = scan.start
        while word := (yield from scan.until((START, CHANNEL, END), scan.text)):
            if word == END:
                scan.drop()
            elif not (yield from scan.until((MESSAGE,), lambda: None)):
                scan.drop()  # the answer ends within a header
            elif " to=" in scan.since(0):
                scan.text()
            elif f"{CHANNEL}analysis" in scan.since(0):
                yield from self._reasoning(scan)
            else:
                scan.drop()

    def _addressed_at_once(self, scan: Scan) -> Steps[bool]:
        """Whether the answer begins with the recipient of a call; reads the header if so."""
        yield from scan.spaces()
        if not (yield from scan.literal("to=")):
            return False
        yield from scan.until((MESSAGE,), lambda: None)
        scan.text()
        return True

    def _reasoning(self, scan: Scan) -> Steps[None]:
        """Reads a message up to its end."""
        scan.drop()
        yield from scan.until((END, START), scan.reasoning)
        if scan.since(0) == START:
            scan.at = scan.start
        scan.drop()


_FAMILIES = (
    Channels(
        "channels",
        (f"{CHANNEL}analysis{MESSAGE}",),
        (END,),
        turn=f"{START}assistant",
        header=f"{CHANNEL}final{MESSAGE}",
    ),
    _Response("response", ("<think>",), ("</think>",), turn="<response>", footer="</response>"),
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
        if family.shown_by(template_source):
            return family
    return None
