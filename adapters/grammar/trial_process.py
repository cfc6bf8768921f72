"""The process that tries grammars out: limits on itself first, then one grammar at a time.

It first reads a Begin. Each question is a grammar, answered by what is wrong with it, or "".
"""

import os
import resource
from functools import partial

import msgspec

from loraplex.adapters.grammar.compile import GrammarError, compile_grammar, try_first_tokens
from loraplex.adapters.grammar.deep_threads import STACK_BYTES, run_deep
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import KnownTokens, Vocabulary, vocabulary_of
from loraplex.adapters.helpers.answering import answer_questions, read_frame

_OWN_BYTES = (2 << 30) + 2 * STACK_BYTES  # address space of Python, libraries and stacks
_NICE = 10  # what serves goes first


class Begin(msgspec.Struct, frozen=True, array_like=True):
    limits: GrammarLimits
    tokens: KnownTokens


# Of a process that is only started to see whether it can be.
_ANY = Begin(GrammarLimits(), KnownTokens([b"."], (0,), {0: b"."}))


def main() -> None:
    frame = read_frame()
    begin = msgspec.msgpack.decode(frame, type=Begin) if frame else _ANY
    vocabulary = vocabulary_of(begin.tokens)
    _limit_self(begin.limits)
    os.nice(_NICE)
    answer_questions(partial(_problem, vocabulary, begin.limits), begin.limits.compile_s)


def _problem(vocabulary: Vocabulary, limits: GrammarLimits, grammar: bytes) -> bytes:
    try:
        run_deep(partial(_try, vocabulary, grammar.decode(), limits))
    except GrammarError as error:
        return str(error).encode()
    return b""


def _try(vocabulary: Vocabulary, grammar: str, limits: GrammarLimits) -> None:
    """Compiles a grammar and tries its first tokens. Raises GrammarError."""
    try_first_tokens(vocabulary, compile_grammar(vocabulary, grammar, limits))


def _limit_self(limits: GrammarLimits) -> None:
    space = _OWN_BYTES + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
