"""gpt-oss: each message names its channel, a call its function. Pure."""

import re
from collections.abc import Collection

from loraplex.router.parts.parts import WHITESPACE, PartsReader, Scan, Steps, StepsReader
from loraplex.router.parts.reasoning import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, TOKENS
from loraplex.router.shape.lark import ANY_TEXT, Lark
from loraplex.router.tools.formats.grammar import arguments_json, free_text_before, several
from loraplex.router.tools.formats.json_calls import flowing_value
from loraplex.router.tools.tools import Tools

_TO = "to=functions."
_NAME = re.compile(r"to=functions\.([A-Za-z0-9_.-]*)")
_TURN = f"{START}assistant"
_PREAMBLE, _FINAL = f"{CHANNEL}commentary{MESSAGE}", f"{CHANNEL}final{MESSAGE}"


class Harmony:
    """Calls as gpt-oss writes them: <|channel|>commentary to=functions.name
    <|constrain|>json<|message|>{…}<|call|>

    The function may stand before the channel. Text is a message of another channel: `commentary`
    before calls, `final` in their place.
    """

    name = "harmony"
    markers = TOKENS
    short_ids = False

    def reader(self, tools: Tools) -> PartsReader:
        names = {tool.name for tool in tools.allowed}
        return StepsReader(lambda scan: _steps(scan, names))

    def rules(self, tools: Tools, lark: Lark) -> str:
        calls = (
            f"{lark.either(map(lark.literal, _headers(tool.name)))} "
            f"{arguments_json(tools, tool, lark)} ({lark.literal(CALL)})?"
            for tool in tools.allowed
        )
        call = lark.rule("call", lark.either(calls))
        listed = several(tools, call, lark.literal(_TURN))
        if tools.mode == "required":
            return listed
        said = f"{lark.literal(_PREAMBLE)} {free_text_before(lark, END)} {lark.literal(_TURN)}"
        return lark.either((f"({said})? {listed}", f"{lark.literal(_FINAL)} {ANY_TEXT}"))


HARMONY = Harmony()


def _headers(name: str) -> tuple[str, str]:
    """The header of a call by models, and by templates for earlier turns."""
    return (
        f"{CHANNEL}commentary {_TO}{name} {CONSTRAIN}json{MESSAGE}",
        f" {_TO}{name}{CHANNEL}commentary json{MESSAGE}",
    )


def _steps(scan: Scan, names: Collection[str]) -> Steps[None]:
    yield from scan.spaces()
    begun = yield from scan.literal(_TO)  # the prompt ends with the begin of a message
    if not begun:
        scan.at = scan.start
    while begun or (yield from scan.until((START, CHANNEL, END), scan.text, WHITESPACE)):
        begun = False
        if scan.since(0).endswith(END):
            scan.drop_space()
        elif not (yield from scan.until((MESSAGE,), lambda: None)):
            scan.drop()  # the answer ends within a header
        else:
            yield from _message(scan, names)


def _message(scan: Scan, names: Collection[str]) -> Steps[None]:
    """Reads a message whose header is read."""
    found = _NAME.search(scan.since(0))
    if found is None:
        scan.drop_space()
        return
    yield from scan.spaces()
    if found[1] not in names or (yield from scan.peek()) != "{":
        scan.text()
        return
    name = found[1]
    scan.open_call(name)
    whole = yield from flowing_value(scan)
    yield from scan.until((CALL, END, START), scan.drop if whole else scan.arguments)
    if scan.since(0) == START:
        scan.at = scan.start
    scan.drop()
