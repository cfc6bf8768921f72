"""The step from an authorised call to what the engine reads: ids, sampling, how answers are read.

Runs on the event loop; long texts, templates and grammars have threads and processes of their own.
A grammar is tried out once, in turn, before the request waits.
"""

import hashlib
import secrets
from collections.abc import Sequence
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
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.api.request.pictures import check_given
from loraplex.router.call import GenerationCall, RequestError, VectorCall
from loraplex.router.generation.division import AnswerParts, PartsOfAnswers
from loraplex.router.generation.ends import AnswerEnds
from loraplex.router.generation.prompts import (
    Prompt,
    PromptMakers,
    build_prompts,
    render_messages,
    resolve_sampling,
    unbound_hints,
)
from loraplex.router.generation.vectors import (
    TextReader,
    VectorReading,
    class_prompts,
    paired_vector_prompts,
    unbound_prompts,
    unpadded,
    vector_prompts,
    vector_reading,
)
from loraplex.router.names.served import ServedAdapter
from loraplex.router.parts.division import Division
from loraplex.router.parts.reasoning import Reasoning
from loraplex.router.policy.quota import UNSTATED_TOKENS
from loraplex.router.shape.shape import JsonSchema, Shape, ShapeRefused, StructuralTag
from loraplex.router.text.model import AdapterModels, TextModel
from loraplex.router.text.turn_taking import PROCESSES
from loraplex.router.tools.compose import Composed, Frame, compose
from loraplex.router.tools.registry import DEFAULT
from loraplex.server.protocol import PairForm, SamplingParams, ThinkingBudget, VectorParams

_MAX_KEPT = 4096
# To compose a grammar without schemas takes so many times as long as to encode its form's text.
_COST_OF_FORM = 8
# Grammars that are kept as they were composed: texts of up to 256 KiB.
_MAX_COMPOSED = 256

_SEED_BITS = 53  # what JSON numbers carry without loss everywhere


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


def adapter_from(prompt_ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Finds the first token of the last occurrence of `invocation`, as in PEFT; None = there is
    none, and the adapter acts on no token. Of an adapter without one 0.
    """
    if not invocation:
        return 0
    # A character for each id that is sought: bytes of ids match between two ids, too, perhaps
    # everywhere. Backwards, since the time of `find` is bounded and that of `rfind` is not.
    letters = {token_id: chr(number) for number, token_id in enumerate(invocation, 1)}
    text, sought = (
        "".join(letters.get(token_id, "\0") for token_id in reversed(ids))
        for ids in (prompt_ids, invocation)
    )
    behind = text.find(sought)
    return None if behind < 0 else len(prompt_ids) - behind - len(invocation)


class PromptTask(msgspec.Struct, frozen=True):
    """One prompt of a call, and how its output is drawn.

    index: of the prompt in its call. seed: of all its choices, which draw apart by their numbers.
    division: how its answers are divided; None = all of them is text.
    adapter_from: the first token on which the call's adapter acts; None = it acts on none.
    vector: what it is read for, in place of an answer.
    """

    index: int
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    division: Division | None = None
    adapter_from: int | None = 0
    vector: VectorParams | None = None


class TokenisedRequest(msgspec.Struct, frozen=True):
    """A call as the engine reads it. call: with the tasks' sampling. reading: for vectors."""

    call: GenerationCall
    tasks: Sequence[PromptTask]
    reading: VectorReading | None = None

    @property
    def seed(self) -> int:
        """The answer's: of its first prompt."""
        return self.tasks[0].seed

    @property
    def num_sequences(self) -> int:
        return len(self.tasks) * self.call.best_of

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(task.prompt.ids) for task in self.tasks)

    @property
    def picture_bytes(self) -> int:
        """Bytes of the pictures' files, which are kept until the request ends."""
        return sum(len(file.data) for task in self.tasks for file in task.prompt.files)

    @property
    def most_output_tokens(self) -> int:
        """The most that may come, or what is reserved where nobody said it."""
        cap = None if self.call.max_tokens is not None else UNSTATED_TOKENS
        most = (task.sampling.max_tokens for task in self.tasks)
        return self.call.best_of * sum(m if cap is None else min(m, cap) for m in most)


class Tokeniser:
    """Turns calls into workers' tasks. ends, shapes: kept by content. makers: of prompts."""

    def __init__(self, makers: PromptMakers, parts: AnswerParts, grammars: GrammarLimits) -> None:
        self.ends = AnswerEnds(makers.sandbox)
        self.shapes = AnswerShapes(grammars)
        self._models = AdapterModels()
        self.makers = makers
        self._parts = parts

    async def model_of(self, base: TextModel, manifest: AdapterManifest | None) -> TextModel:
        """Returns the model that reads and writes the text of an adapter. Raises RequestError."""
        return await self._models.of(base, manifest)

    async def prompts(
        self, call: GenerationCall, model: TextModel, adapter: ServedAdapter | None, tenant: str
    ) -> list[Prompt]:
        """Builds the call's prompts, in order. tenant: the caller's. Raises as `build_prompts`."""
        check_given(call, model.card)
        template = None if adapter is None else adapter.manifest.template
        if call.vector is not None:
            vector = call.vector
            if call.messages is not None:
                chat = (call.messages, call.template, model, template, self.makers.sandbox)
                text = (await render_messages(*chat)).text
                call = msgspec.structs.replace(call, prompts=(text,))
            return await _texts_read(call, vector, model)
        makers = self.makers._replace(reader=self.makers.reader.of(tenant))
        return await build_prompts(call, model, template, makers)

    async def tokenise(
        self,
        call: GenerationCall,
        model: TextModel,
        adapter: ServedAdapter | None,
        prompts: Sequence[Prompt],
    ) -> TokenisedRequest:
        """Turns a call with its prompts into tasks for workers. Raises RequestError."""
        reading = None if call.vector is None else vector_reading(call.vector, model.card)
        starts = await _starts(model, adapter, prompts)
        if reading is not None:
            call = msgspec.structs.replace(call, unbound=unbound_prompts(call, model.card))
            return _read(call, reading, starts, prompts)
        first = prompts[0]
        parts = self._parts_of(call, model, adapter, first.rendered.has_default_text)
        unbound = unbound_hints(call, first, parts.reasoning is not None)
        ends = await self.ends.of(model, None if adapter is None else adapter.manifest)
        call = await self.shapes.hold(call, model, parts, first.text)
        shaped = call.sampling
        # The best of several are found by their log-probabilities, shown or not.
        ranks = call.best_of > call.n and shaped.logprobs is None
        sampling = msgspec.structs.replace(
            shaped, end_token_ids=ends, logprobs=0 if ranks else shaped.logprobs
        )
        unbound = (*call.unbound, *unbound)
        call = msgspec.structs.replace(call, sampling=sampling, unbound=unbound)
        samplings = [resolve_sampling(call, model, prompt) for prompt in prompts]
        seed = secrets.randbits(_SEED_BITS) if call.seed is None else call.seed
        tasks = [
            PromptTask(
                index=index,
                prompt=prompt,
                sampling=samplings[index],
                seed=_seed(call, index, seed),
                division=parts.division(call, prompt.text),
                adapter_from=starts[index],
            )
            for index, prompt in enumerate(prompts)
        ]
        return TokenisedRequest(call, tasks)

    def _parts_of(
        self,
        call: GenerationCall,
        model: TextModel,
        adapter: ServedAdapter | None,
        has_default_text: bool,
    ) -> PartsOfAnswers:
        """Finds how the answers to a call are written. Raises RequestError."""
        template = None if adapter is None else adapter.manifest.template
        named = "" if adapter is None else adapter.tool_format
        return self._parts.of(
            call, model.card, template, DEFAULT.name if has_default_text else named
        )


async def _texts_read(call: GenerationCall, vector: VectorCall, model: TextModel) -> list[Prompt]:
    """Makes the prompts of texts that are only read. Raises RequestError."""
    card = model.card
    if vector.use == "classes":
        return await class_prompts(call, model)
    if vector.use == "vector" or card.pairs is None:
        return await vector_prompts(call, vector, model)
    if card.pairs.by == "vectors" and card.vectors is not None:
        return await paired_vector_prompts(call, vector, card.vectors, model)
    return await pair_prompts(call, vector, card.pairs, model)


def _read(
    call: GenerationCall,
    reading: VectorReading,
    starts: Sequence[int | None],
    prompts: Sequence[Prompt],
) -> TokenisedRequest:
    """A call whose prompts are read for vectors."""
    tasks = [
        PromptTask(
            index=index,
            prompt=prompt,
            sampling=call.sampling,
            seed=0,
            adapter_from=starts[index],
            vector=msgspec.structs.replace(reading.params, second=prompt.second),
        )
        for index, prompt in enumerate(prompts)
    ]
    return TokenisedRequest(call, tasks, reading)


async def _starts(
    model: TextModel, adapter: ServedAdapter | None, prompts: Sequence[Prompt]
) -> list[int | None]:
    """The first token of each prompt on which the adapter acts; None = none."""
    invocation = () if adapter is None else adapter.manifest.invocation_tokens
    size = sum(len(prompt.ids) for prompt in prompts) + len(invocation) if invocation else 0
    return await model.turns.run(
        size, lambda: [adapter_from(prompt.ids, invocation) for prompt in prompts]
    )


def _seed(call: GenerationCall, prompt_index: int, seed: int) -> int:
    """Prompts of one call are as independent as calls are, unless the caller fixed the seed."""
    return seed if call.seed is not None or prompt_index == 0 else secrets.randbits(_SEED_BITS)


_DOCUMENT = "{document}"


async def pair_prompts(
    call: GenerationCall, vector: VectorCall, form: PairForm, model: TextModel
) -> list[Prompt]:
    """Prompts of each document with its query. Raises RequestError (invalid, context_length)."""
    if vector.instruction is not None and "{instruction}" not in form.template:
        message = "`instruction`: the model's prompt has no place for one"
        raise RequestError("invalid", message, param="instruction")
    reader = _PairReader(call, vector, form, model)
    queries = sum(map(len, vector.queries)) + len(form.template) * len(call.prompts)
    size = sum(map(len, call.prompts)) + queries
    return await model.turns.run(size, reader.all)


class _PairReader(TextReader):
    def __init__(
        self, call: GenerationCall, vector: VectorCall, form: PairForm, model: TextModel
    ) -> None:
        super().__init__(call, model, model.card.max_context)
        self._vector, self._form = vector, form

    def all(self) -> list[Prompt]:
        """Makes the prompts of all pairs of a query and a document. Raises RequestError."""
        pairs = zip(self._vector.queries, self._call.prompts, strict=True)
        return [self._pair(i, query, str(document)) for i, (query, document) in enumerate(pairs)]

    def _pair(self, index: int, query: str, document: str) -> Prompt:
        field = self.field(index)
        self.check_size(document, field)
        self.check_size(query, "query")
        document = self._shortened(document)
        before, after = self._around(query)
        second = None
        if self._form.template:
            ids = self._model.encode(before + document + after, add_special_tokens=False)
            tail = len(self._model.encode(after, add_special_tokens=False)) if after else 0
        else:
            ids, second = self._model.encode_pair(query, document)
            own = self._model.encode(document, add_special_tokens=False)
            tail = _behind(ids, own)
        if self._call.truncate is not None and len(ids) > self.most:
            room = self.most - tail
            ids = [*ids[: max(0, room)], *(ids[len(ids) - tail :] if tail else ())]
        second = None if second is None else min(second, len(ids))
        prompt = msgspec.structs.replace(self.checked("", ids, field), second=second)
        return unpadded(prompt, self._model)

    def _shortened(self, document: str) -> str:
        most = self._vector.max_document_tokens
        if most is None:
            return document
        ids = self._model.encode(document, add_special_tokens=False)
        return document if len(ids) <= most else self._model.decode(ids[:most])

    def _around(self, query: str) -> tuple[str, str]:
        """Texts before the document and behind the document."""
        asked = self._vector.instruction
        values = {
            "{instruction}": self._form.instruction if asked is None else asked,
            "{query}": query,
        }
        before, _, after = self._form.template.partition(_DOCUMENT)
        return _filled(before, values), _filled(after, values)


def _filled(text: str, values: dict[str, str]) -> str:
    """Fills a text: each name is replaced by its value. Names within a value stay as they are."""
    for name, value in values.items():
        head, found, tail = text.partition(name)
        if found:
            others = {other: said for other, said in values.items() if other != name}
            return f"{_filled(head, others)}{value}{_filled(tail, others)}"
    return text


def _behind(ids: list[int], own: list[int]) -> int:
    """Counts how many tokens follow the last occurrence of these."""
    for end in range(len(ids), len(own) - 1, -1):
        if ids[end - len(own) : end] == own:
            return len(ids) - end
    return 0
