"""The process that tries grammars out: limits on itself first, then one grammar at a time.

Frames on stdin and stdout: 4 bytes of length, big-endian, then msgpack. The first frame says what
to expect; each later one is a grammar, answered by what is wrong with it, or "".
"""

import resource
import signal
import sys
from functools import partial

import msgspec

from adapters.grammar.compile import GrammarError, compile_grammar
from adapters.grammar.deep_threads import STACK_BYTES, run_deep
from adapters.grammar.limits import GrammarLimits
from adapters.grammar.vocabulary import byte_vocabulary

_OWN_BYTES = (2 << 30) + 2 * STACK_BYTES  # address space of Python, libraries and stacks


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """vocab_size, end_ids, specials: of the vocabulary."""

    limits: GrammarLimits
    vocab_size: int
    end_ids: tuple[int, ...]
    specials: dict[int, bytes]


def main() -> None:
    begin = msgspec.msgpack.decode(read_frame() or b"", type=Begin)
    vocabulary = byte_vocabulary(begin.vocab_size, begin.end_ids, begin.specials)
    _limit_self(begin.limits)
    _write(b"")
    while (frame := read_frame()) is not None:
        # Its default action ends the process, in the middle of a C call if need be.
        signal.setitimer(signal.ITIMER_PROF, begin.limits.compile_s)
        try:
            run_deep(partial(compile_grammar, vocabulary, frame.decode(), begin.limits))
            answer = ""
        except GrammarError as error:
            answer = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer.encode())


def _limit_self(limits: GrammarLimits) -> None:
    space = _OWN_BYTES + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))


def read_frame() -> bytes | None:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    return sys.stdin.buffer.read(int.from_bytes(head, "big"))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
