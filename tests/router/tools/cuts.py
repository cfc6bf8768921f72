"""Answers cut at every byte, as a detokenizer gives them to a PartsReader."""

from collections.abc import Callable, Iterator
from os.path import commonprefix

from loraplex.adapters.byte_tokens import BYTE_OF_CHAR
from loraplex.router.parts.parts import PartsReader
from loraplex.router.text.text_decoder import make_decoder
from tests.router.tools.call_reading import Reading, read

_CHAR_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHAR.items()}


def cuts(answer: str) -> Iterator[tuple[str, str]]:
    """After each byte: the text that is certain, and what an answer that ends there adds."""
    decoder = make_decoder({"type": "ByteLevel"})
    given = ""
    for byte in answer.encode():
        yield given, decoder.copy().flush()
        given += decoder.push(_CHAR_OF_BYTE[byte])
    assert given == answer, "the last byte makes the text whole"
    yield given, ""


def check_cuts(make_reader: Callable[[], PartsReader], answer: str, whole: Reading) -> None:
    """Two halves give the whole reading; an answer that ends at a cut gives the begin of it."""
    assert read(make_reader(), answer) == whole, answer
    for given, held in cuts(answer):
        halves = [given, answer[len(given) :]]
        assert read(make_reader(), halves) == whole, halves
        check_begin(read(make_reader(), [given, held]), whole, given, held)


def check_begin(part: Reading, whole: Reading, given: str, held: str) -> None:
    """part: the reading of `given` and `held` alone. Nothing in it is made up."""
    assert len(part.calls) <= len(whole.calls), given
    for (name, arguments), (whole_name, whole_arguments) in zip(
        part.calls, whole.calls, strict=False
    ):
        assert name == whole_name, given
        begin = arguments.removesuffix(held)
        assert whole_arguments.startswith(begin.rstrip()), (given, arguments)
    for (_, arguments), (_, whole_arguments) in zip(part.calls[:-1], whole.calls, strict=False):
        assert arguments == whole_arguments, given
    assert _is_begin(part.text, whole.text, given + held), (given, part.text)


def _is_begin(text: str, whole: str, answer: str) -> bool:
    """Whether the text is the begin of the whole one and what was not known to be a call.

    The space before a call stays between two texts.
    """
    same = len(commonprefix((text, whole)))
    return answer.endswith(text[same:].lstrip())
