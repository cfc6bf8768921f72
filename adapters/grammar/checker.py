"""Tries in another process whether a caller's grammar compiles within its limits.

What takes too long, too much memory or all of a stack costs that process, and nobody else.
"""

import queue

import msgspec

from loraplex.adapters.grammar.compile import GrammarError, GrammarTooCostly, check_source
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.trial_process import Begin
from loraplex.adapters.grammar.vocabulary import KnownTokens
from loraplex.adapters.helpers.helper import Helper, HelperBroken, HelperStopped, HelperUnavailable

CHECKER = "loraplex.adapters.grammar.trial_process"
# Beyond its processor time, for a machine that is busy with what goes before grammars.
_PATIENCE_S = 60.0
_MAX_ANSWER_BYTES = 1 << 16


class CheckerUnavailable(Exception):
    """No process can answer now. It says nothing about the grammar."""


class CheckerBroken(CheckerUnavailable):
    """No process can be started on this machine; str() says why."""


class GrammarChecker:
    """Checks grammars in helper processes. Its processes start when first needed; calls beyond them
    wait. For any thread.

    A grammar meets the same tokens and limits here and where it is used.
    """

    def __init__(self, tokens: KnownTokens, limits: GrammarLimits, processes: int = 1) -> None:
        self.limits = limits
        begin = msgspec.msgpack.encode(Begin(limits, tokens))
        timeout_s = limits.compile_s + _PATIENCE_S
        self._all = [Helper(CHECKER, begin, timeout_s, _MAX_ANSWER_BYTES) for _ in range(processes)]
        self._idle: queue.SimpleQueue[Helper] = queue.SimpleQueue()
        for helper in self._all:
            self._idle.put(helper)

    def check(self, grammar: str) -> None:
        """Lets a helper process compile a grammar. Raises GrammarError, CheckerUnavailable."""
        check_source(grammar, self.limits)
        helper = self._idle.get()
        try:
            problem = helper.ask(grammar.encode("utf-8", "replace")).decode()
        except HelperStopped:
            raise GrammarTooCostly(
                f"it needs more than {self.limits.compile_s:g} s of processor time or "
                f"{self.limits.memory_bytes >> 20} MiB of memory to compile"
            ) from None
        except HelperBroken as error:
            raise CheckerBroken(f"grammars cannot be checked here: {error}") from error
        except HelperUnavailable as error:
            raise CheckerUnavailable("grammars cannot be checked now") from error
        finally:
            self._idle.put(helper)
        if problem:
            raise GrammarError(problem)

    def close(self) -> None:
        """Ends the processes. Callers that wait for one hear that it is lost."""
        for helper in self._all:
            helper.stop()
