"""Holds an answer to the form that its caller asked for: the grammar in its sampling.

A grammar is tried out once, in a process of its own and in turn, before the request waits.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

import msgspec

from loraplex.adapters.common.pauses import full_collections
from loraplex.adapters.common.recent import Recent
from loraplex.adapters.grammar.checker import CheckerBroken, CheckerUnavailable, GrammarChecker
from loraplex.adapters.grammar.compile import GrammarError
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import VocabularyError, read_tokens
from loraplex.router.call import GenerationCall, RequestError
from loraplex.router.generation.division import PartsOfAnswers
from loraplex.router.parts.reasoning import Reasoning
from loraplex.router.shape.shape import JsonSchema, Shape, ShapeRefused, StructuralTag
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import PROCESSES
from loraplex.router.tools.compose import Composed, Frame, compose
from loraplex.server.protocol import ThinkingBudget

_MAX_KEPT = 4096
# To compose a grammar without schemas takes so many times as long as to encode its form's text.
_COST_OF_FORM = 8
# Grammars that are kept as they were composed: texts of up to 256 KiB.
_MAX_COMPOSED = 256


class AnswerShapes:
    """Holds answers to the forms that are asked for. It works on the event loop. What was found out
    of a grammar is kept by its content.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(PROCESSES, "shapes")  # those that wait for trials
        self._problems: Recent[bytes, str] = Recent(_MAX_KEPT)
        self._known: Recent[bytes, Composed] = Recent(_MAX_COMPOSED)
        self._changing = Lock()
        self._checker: tuple[str, GrammarChecker] | None = None

    async def hold(
        self, call: GenerationCall, model: TextModel, parts: PartsOfAnswers, prompt: str
    ) -> GenerationCall:
        """The call with what its form, tools, budget and bad words are to the engine. Raises
        RequestError (invalid, unsupported, unavailable, overloaded)."""
        call = _within_budget(call, model, parts.reasoning, prompt)
        is_held = call.shape is not None or (call.tools is not None and call.tools.is_held)
        if not is_held and not call.bad_words:
            return call
        frame = parts.frame(call, prompt, model.special_ids) if is_held else None
        composed = Composed("") if frame is None else await self._composed(call, model, frame)
        if composed.grammar:
            await self._check(composed.grammar, _param(call), model)
        size = len(repr(call.bad_words))
        bad_words = await model.turns.run(size, partial(_spellings, call.bad_words, model))
        sampling = msgspec.structs.replace(
            call.sampling,
            grammar=composed.grammar,
            bad_words=bad_words,
            names_once=composed.names_once,
        )
        unbound = (*call.unbound, *composed.unbound)
        return msgspec.structs.replace(call, sampling=sampling, unbound=unbound)

    def close(self) -> None:
        with self._changing:
            held, self._checker = self._checker, None
        if held is not None:
            held[1].close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _composed(self, call: GenerationCall, model: TextModel, frame: Frame) -> Composed:
        """Composes the grammar of an answer. Raises RequestError. Even a short schema may take a
        second, so that a new one takes a turn; what is known is found before any line.
        """
        content = repr((call.shape, frame)).encode("utf-8", "surrogatepass")
        key = hashlib.sha256(content).digest()
        known = self._known.get(key)
        if known is None:
            work = partial(_compose, call.shape, frame)
            if frame.tools is not None or isinstance(call.shape, JsonSchema | StructuralTag):
                known = await model.turns.run_apart("grammar", 1, work, self._threads)
            else:
                known = await model.turns.run(_COST_OF_FORM * len(content), work)
            self._known.put(key, known)
        return known

    async def _check(self, grammar: str, param: str, model: TextModel) -> None:
        """Checks that a grammar compiles. Raises RequestError. A known one waits in no line."""
        content = grammar.encode("utf-8", "surrogatepass")
        key = hashlib.sha256(model.card.base_digest.encode() + b"\0" + content).digest()
        problem = self._problems.get(key)
        if problem is None:
            work = partial(self._tried, grammar, key, model)
            try:
                problem = await model.turns.run_apart("grammar", 1, work, self._threads)
            except VocabularyError as error:
                message = f"`{param}`: {error}"
                raise RequestError("unsupported", message, param=param) from None
            except CheckerBroken as error:
                raise RequestError("not_served", str(error), param=param) from error
            except CheckerUnavailable as error:
                raise RequestError("unavailable", str(error)) from error
        if problem:
            raise RequestError("invalid", f"`{param}`: {problem}", param=param)

    def _tried(self, grammar: str, key: bytes, model: TextModel) -> str:
        """Tries a grammar; returns its fault, or "". Raises VocabularyError, CheckerUnavailable."""
        problem = self._problems.get(key)  # another's trial of it may have ended meanwhile
        if problem is None:
            try:
                self._checker_of(model).check(grammar)
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
            checker = GrammarChecker(tokens, self._limits, PROCESSES)
            before, self._checker = self._checker, (card.base_digest, checker)
        if before is not None:
            before[1].close()
        return checker


def _compose(shape: Shape | None, frame: Frame) -> Composed:
    """Composes the grammar of an answer from its form and frame. Raises RequestError (invalid)."""
    with full_collections.held_off():
        try:
            return compose(shape, frame)
        except ShapeRefused as error:
            message, param = f"`{error.param}`: {error.message}", error.param
    # Not above: by its context the error would keep all that was built.
    raise RequestError("invalid", message, param=param)


def _within_budget(
    call: GenerationCall, model: TextModel, reasoning: Reasoning | None, prompt: str
) -> GenerationCall:
    """Returns the call with its bound on the reasoning as tokens. Raises RequestError."""
    if reasoning is None and call.api == "chat" and call.thinking_budget is not None:
        message = "`thinking_token_budget`: the text of this model has no reasoning apart"
        raise RequestError("unsupported", message, param="thinking_token_budget")
    if reasoning is None or call.thinking_budget is None:
        return call
    if prompt.rstrip().endswith(reasoning.closes):
        return call
    opens = "" if reasoning.begun(prompt) else reasoning.opens[0]
    marks = (tuple(model.encode(text, False)) for text in (opens, reasoning.closes[0]))
    thinking = ThinkingBudget(call.thinking_budget, *marks)
    sampling = msgspec.structs.replace(call.sampling, thinking=thinking)
    return msgspec.structs.replace(call, sampling=sampling)


def _param(call: GenerationCall) -> str:
    if call.shape is not None:
        return call.shape.param
    return "tools" if call.tools is None else call.tools.field


def _spellings(words: tuple[str, ...], model: TextModel) -> tuple[tuple[int, ...], ...]:
    """Lists token ids of each word, at the beginning of a text and after a space."""
    found = (tuple(model.encode(f"{space}{word}", False)) for word in words for space in ("", " "))
    return tuple(dict.fromkeys(ids for ids in found if ids))
