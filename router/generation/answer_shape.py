"""Holds an answer to the form that its caller asked for: the grammar in its sampling.

Grammars are composed and tried out in threads and processes of their own, before the request waits.
"""

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import msgspec

from adapters.common.recent import Recent
from adapters.grammar.checker import CheckerBroken, CheckerUnavailable, GrammarChecker
from adapters.grammar.compile import GrammarError
from adapters.grammar.limits import GrammarLimits
from adapters.grammar.vocabulary import VocabularyError, read_tokens
from router.call import GenerationCall, RequestError
from router.generation.answer_parts import PartsOfAnswers
from router.shape.shape import ShapeRefused
from router.text.model import TextModel
from router.tools.compose import Frame, grammar_of
from server.protocol import SamplingParams

_MAX_KEPT = 4096
# So that one caller's costly grammar holds nobody up.
_PROCESSES = 2


class AnswerShapes:
    """For the event loop. What was found out of a grammar is kept by its content."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(_PROCESSES, "shapes")
        self._problems: Recent[bytes, str] = Recent(_MAX_KEPT)
        self._changing = Lock()
        self._checker: tuple[str, GrammarChecker] | None = None

    async def hold(
        self, call: GenerationCall, model: TextModel, parts: PartsOfAnswers, prompt: str
    ) -> SamplingParams:
        """The call's sampling with what its form, tools and bad words are to the engine.

        Raises RequestError (invalid, unsupported, unavailable).
        """
        is_held = call.shape is not None or (call.tools is not None and call.tools.is_held)
        if not is_held and not call.bad_words:
            return call.sampling
        frame = parts.frame(call, prompt, model.special_ids) if is_held else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._held, call, model, frame)

    def close(self) -> None:
        with self._changing:
            held, self._checker = self._checker, None
        if held is not None:
            held[1].close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _held(self, call: GenerationCall, model: TextModel, frame: Frame | None) -> SamplingParams:
        return msgspec.structs.replace(
            call.sampling,
            grammar="" if frame is None else self._grammar(call, model, frame),
            bad_words=_spellings(call.bad_words, model),
        )

    def _grammar(self, call: GenerationCall, model: TextModel, frame: Frame) -> str:
        param = "tools" if call.shape is None else call.shape.param
        try:
            grammar = grammar_of(call.shape, frame)
            problem = self._problem(grammar, model)
        except ShapeRefused as error:
            message = f"`{error.param}`: {error.message}"
            raise RequestError("invalid", message, param=error.param) from None
        except VocabularyError as error:
            message = f"`{param}`: {error}"
            raise RequestError("unsupported", message, param=param) from None
        except CheckerBroken as error:
            raise RequestError("not_served", str(error), param=param) from error
        except CheckerUnavailable as error:
            raise RequestError("unavailable", str(error)) from error
        if problem:
            raise RequestError("invalid", f"`{param}`: {problem}", param=param)
        return grammar

    def _problem(self, grammar: str, model: TextModel) -> str:
        """ "" = there is none. Raises VocabularyError, CheckerUnavailable."""
        digest = model.card.base_digest
        content = grammar.encode("utf-8", "surrogatepass")
        key = hashlib.sha256(digest.encode() + b"\0" + content).digest()
        problem = self._problems.get(key)
        if problem is None:
            checker = self._checker_of(model)
            try:
                checker.check(grammar)
                problem = ""
            except GrammarError as error:
                problem = str(error)
            self._problems.put(key, problem)
        return problem

    def _checker_of(self, model: TextModel) -> GrammarChecker:
        card = model.base_card  # the worker's grammars are written in the base's tokens
        with self._changing:
            if self._checker is not None and self._checker[0] == card.base_digest:
                return self._checker[1]
            tokens = read_tokens(card.tokenizer_json, card.vocab_size, card.eos_token_ids)
            checker = GrammarChecker(tokens, self._limits, _PROCESSES)
            before, self._checker = self._checker, (card.base_digest, checker)
        if before is not None:
            before[1].close()
        return checker


def _spellings(words: tuple[str, ...], model: TextModel) -> tuple[tuple[int, ...], ...]:
    """Of each word at the begin of a text and after a space."""
    found = (tuple(model.encode(f"{space}{word}", False)) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(ids for ids in found if ids))
