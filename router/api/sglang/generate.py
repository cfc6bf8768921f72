"""SGLang's shape of `/generate`: a body becomes that of a completion; answers. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loraplex.router.api.openai import completions
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.request.body import decode_plain, only_one_of, require, typed
from loraplex.router.api.request.fields import (
    MAX_INT32,
    CacheSalt,
    LogitBias,
    LogprobsMode,
    NonNegative,
    Pattern,
    Penalty,
    Positive,
    Priority,
    Probability,
    RepetitionPenalty,
    RequestId,
    StopString,
    TopK,
    UnitInterval,
)
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import (
    Body,
    check_unknown,
    check_unknown_parts,
    typed_by_aliases,
    unsupported,
)
from loraplex.router.api.request.pictures import as_url
from loraplex.router.api.request.shapes import StructuredOutputs
from loraplex.router.api.routed_experts import as_int32
from loraplex.router.api.wire import completed, encode, finite, sse, sse_error
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    FinishReason,
    GivenPicture,
    PromptInfo,
    RequestError,
    TextEvent,
    TextToken,
    TopToken,
)
from loraplex.server.protocol import RoutedExperts

# Fields that may have a value for each prompt.
_OF_EACH = frozenset(
    ("lora_path", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    + ("token_ids_logprob", "image_data", "rid")
)
_HAS_LISTS = re.compile(rb'"(?:lora_path|sampling_params)"\s*:\s*\[')


class SglangOptions(msgspec.Struct, frozen=True):
    """How a request wants its answer.

    rid: the caller's own id. rids: one for each prompt. top: likeliest tokens beside each; None =
    no logprobs. prompt_from: the first of the prompt's tokens that has a logprob; None = none has.
    lists: the call lists tokens by id. routed_from: the first token whose experts are reported.
    """

    n: int
    is_list: bool
    rid: str | None = None
    rids: tuple[str, ...] = ()
    top: int | None = None
    prompt_from: int | None = None
    with_texts: bool = False
    lists: bool = False
    routed_from: int = 0


class TokenScore(NamedTuple):
    """Log-probability of one token, as SGLang writes it. text: null unless it is asked for.
    logprob: null for a prompt's first token.
    """

    logprob: float | None
    token_id: int
    text: str | None


class StopFinish(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    """End of an answer at a stop string or token. matched: the stop string, or the id of the token
    that ended the answer.
    """

    matched: int | str | None


class LengthFinish(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """End of an answer that has as many tokens as it may have. length: tokens that were
    generated.
    """

    length: int


class AbortFinish(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    """End of an answer that was aborted: its text and ids are what there was."""

    message: str = "aborted by the caller"


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an answer, apart from its text. finish_reason: null while it goes on.
    e2e_latency: seconds, at the end. From input_token_logprobs on: where they were asked for.
    routed_experts: int32 `[tokens - 1, layers, top_k]` in base64, at the end: of the tokens of
    prompt and answer but the last, from `routed_experts_start_len` on.
    """

    id: str
    finish_reason: StopFinish | LengthFinish | AbortFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[TokenScore] | UnsetType = UNSET
    output_token_logprobs: list[TokenScore] | UnsetType = UNSET
    input_top_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[TokenScore] | None] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class SglangAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or all of it so far. index: of a stream of several, whose event it is."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class _SoFar(msgspec.Struct):
    """The text and tokens of a choice so far."""

    text: str = ""
    ids: list[int] = []
    tokens: list[TextToken] = []
    finish: FinishReason | None = None
    matched: int | str | None = None
    elapsed_s: float = 0.0
    routed: RoutedExperts | None = None


class SglangFormatter:
    """Writes answers of SGLang's `/generate`. Streams end with `[DONE]`."""

    def __init__(self, head: AnswerHead, options: SglangOptions) -> None:
        self._id = options.rid or head.request_id
        self._options = options
        self._prompts: dict[int, PromptInfo] = {}
        self._so_far: dict[int, _SoFar] = {}

    def prompt(self, info: PromptInfo) -> bytes:
        self._prompts[info.prompt_index] = info
        return b""

    def chunk(self, event: TextEvent) -> bytes:
        """Writes all of an answer so far as an event. Raises RequestError (incomplete)."""
        index = event.prompt_index * self._options.n + event.choice
        known = self._so_far.setdefault(index, _SoFar())
        known.text += event.text
        known.ids += event.token_ids
        known.tokens += event.tokens
        known.finish, known.matched = event.finish, event.matched
        known.elapsed_s, known.routed = event.elapsed_s, event.routed
        answer = self._answer(event.prompt_index, event.choice, known)
        if self._options.is_list:
            answer = msgspec.structs.replace(answer, index=index)
        return sse(answer)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        return sse_error(error, "openai")

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole answer, or the list of answers. Raises RequestError (incomplete)."""
        self._prompts = {info.prompt_index: info for info in prompts}
        answers = [self._answer(one.prompt_index, one.choice, so_far(one)) for one in results]
        return encode(answers if self._options.is_list else answers[0])

    def _answer(self, prompt: int, choice: int, known: _SoFar) -> SglangAnswer:
        info, has_ended = self._prompts[prompt], known.finish is not None
        meta = MetaInfo(
            id=self._id_of(prompt, choice),
            finish_reason=_finish(known),
            prompt_tokens=info.num_tokens,
            completion_tokens=len(known.ids),
            cached_tokens=info.cached_tokens,
            e2e_latency=known.elapsed_s if has_ended else UNSET,
            routed_experts=self._experts(known, info),
        )
        if self._options.top is not None:
            meta = self._scored(meta, info, known.tokens, self._options.top)
        return SglangAnswer(known.text, known.ids, meta)

    def _experts(self, known: _SoFar, info: PromptInfo) -> str | UnsetType:
        """Writes the experts of a choice that has ended. Raises RequestError."""
        start = self._options.routed_from
        most = f"expected 0 to the prompt's {info.num_tokens} tokens"
        require(start <= info.num_tokens, most, "routed_experts_start_len")
        return UNSET if known.routed is None else as_int32(known.routed, start)

    def _id_of(self, prompt: int, choice: int) -> str:
        """Makes an answer's id: each answer has its own."""
        options = self._options
        if options.rids:
            own = options.rids[prompt]
            return own if options.n == 1 else f"{own}_{choice}"
        return f"{self._id}_{prompt * options.n + choice}" if options.is_list else self._id

    def _scored(
        self, meta: MetaInfo, info: PromptInfo, tokens: Sequence[TextToken], top: int
    ) -> MetaInfo:
        start = self._options.prompt_from
        read = () if start is None else info.tokens[start:]
        meta = msgspec.structs.replace(
            meta,
            input_token_logprobs=[self._score(token) for token in read],
            output_token_logprobs=[self._score(token) for token in tokens],
        )
        if self._options.lists:
            meta = msgspec.structs.replace(
                meta,
                input_token_ids_logprobs=[self._scores(token, token.listed) for token in read],
                output_token_ids_logprobs=[self._scores(token, token.listed) for token in tokens],
            )
        if not top:
            return meta
        return msgspec.structs.replace(
            meta,
            input_top_logprobs=[self._scores(token, token.top[:top]) for token in read],
            output_top_logprobs=[self._scores(token, token.top[:top]) for token in tokens],
        )

    def _score(self, token: TextToken) -> TokenScore:
        value = None if token.logprob is None else finite(token.logprob)
        return TokenScore(value, token.token_id, self._text(token.token))

    def _scores(self, token: TextToken, others: Sequence[TopToken]) -> list[TokenScore] | None:
        """Log-probabilities of `others`, shown with a token; None where it has none."""
        if token.logprob is None:
            return None
        return [
            TokenScore(finite(one.logprob), one.token_id, self._text(one.text)) for one in others
        ]

    def _text(self, text: str) -> str | None:
        return text if self._options.with_texts else None


def so_far(result: ChoiceResult | TextEvent) -> _SoFar:
    return _SoFar(
        text=result.text,
        ids=list(result.token_ids),
        tokens=list(result.tokens),
        finish=result.finish,
        matched=result.matched,
        elapsed_s=result.elapsed_s,
        routed=result.routed,
    )


def _finish(known: _SoFar) -> StopFinish | LengthFinish | AbortFinish | None:
    """Describes the end of an answer; None while it goes on. Raises RequestError (incomplete)."""
    if known.finish is None:
        return None
    if known.finish == "abort":
        return AbortFinish()
    if completed(known.finish) == "length":
        return LengthFinish(len(known.ids))
    return StopFinish(known.matched)


DEFAULT_MAX_TOKENS = 128
_TEXTS = ("text", "input_ids")
_IMAGES = "image_data"
T = TypeVar("T")
# -1 = of no token of the prompt.
StartLen = Annotated[int, Meta(ge=-1, le=MAX_INT32)]


class SglangSampling(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's `sampling_params`. Each may be null.

    max_new_tokens: 0 wants the prompt alone, with its logprobs.
    """

    max_new_tokens: NonNegative | None = None
    min_new_tokens: NonNegative | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e4)] | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: UnitInterval | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Positive | None = None
    stop: str | list[StopString] | None = None
    stop_regex: Pattern | list[Pattern] | None = None
    stop_token_ids: list[NonNegative] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None


class AbortBody(msgspec.Struct, frozen=True):
    """Body of SGLang's request to abort answers. rid: of a request that runs. abort_all: all that
    run of the caller's tenant. abort_message: of no effect.
    """

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


def aborted_by(body: bytes) -> str | None:
    """Reads which request is to be aborted: its id; None = all. Raises RequestError."""
    plain = decode_plain(body)
    check_unknown_parts(plain, AbortBody.__struct_fields__, "")
    asked = typed(plain, AbortBody)
    require(asked.rid or asked.abort_all, "is needed, or `abort_all`", "rid")
    return None if asked.abort_all else asked.rid


class SglangBody(Body, frozen=True, kw_only=True):
    """Body of a request to SGLang's `/generate`. text, input_ids: one of both; a list of texts, or
    of lists of ids, is several prompts.

    Lists of values for several prompts are alike: `parts_of` parts a request whose are not.
    logprob_start_len: of the prompt's tokens, the first with a logprob. token_ids_logprob: tokens
    whose logprobs are wanted at each place, or a list of them for each prompt.
    routed_experts_start_len: the first token whose experts are reported. image_data: URLs of images
    or their base64, one or a list; of several prompts one for all, or one or a list for each.
    """

    # They change nothing about the answer, whatever they say.
    harmless: ClassVar[frozenset[str]] = frozenset(
        ("log_metrics", "no_logs", "stream_options", "conversation_id", "routing_key")
    )

    text: str | list[str] | None = None
    input_ids: list[NonNegative | list[NonNegative]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    lora_path: str | list[str | None] | None = None
    rid: RequestId | list[RequestId] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: StartLen | list[StartLen] | None = None
    top_logprobs_num: NonNegative | list[NonNegative] | None = None
    token_ids_logprob: list[NonNegative | list[NonNegative]] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    logprobs_mode: LogprobsMode | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: NonNegative | None = None
    image_data: str | list[str | list[str] | None] | None = None


# A completion's names of the fields.
_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "structured_outputs.structural_tag": "sampling_params.structural_tag",
    **{name: f"sampling_params.{name}" for name in SglangSampling.__struct_fields__},
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
}


def is_native(plain: Mapping[str, Any]) -> bool:
    """Checks whether a body has SGLang's shape, not LoRAX's. Raises RequestError for a mixture."""
    said = [name for name in _TEXTS if plain.get(name) is not None]
    if plain.get("inputs") is None:
        return bool(said)
    if any(plain[name] for name in said):
        only_one_of(plain, ("inputs", *said))
    return False


def parse(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Reads a request in SGLang's shape. Raises RequestError."""
    _check_fields(plain)
    body = typed_by_aliases(plain, SglangBody)
    field = only_one_of(plain, _TEXTS)
    prompt = body.text if field == "text" else body.input_ids
    assert prompt is not None
    count = _num_prompts(prompt)
    sampling = _alike(body.sampling_params, count, "sampling_params") or SglangSampling()
    scored = bool(_alike(body.return_logprob, count, "return_logprob"))
    options = _options(body, prompt, sampling.n or 1, scored)
    try:
        asked = completions.request_of(_completion(body, sampling, prompt, options), limits, bearer)
    except RequestError as error:
        raise error.spelled(_NAMES | {"prompt": field}) from None
    rids = (options.rid,) if options.rid else options.rids
    pictures = _pictures(body.image_data, count)
    call = msgspec.structs.replace(asked.call, api="sglang", rids=rids, pictures=pictures)
    wanted = {"logprobs": options.top}
    if options.prompt_from is not None:
        wanted["prompt_logprobs"] = options.top
    scored_too = msgspec.structs.replace(call.sampling, **wanted)
    call = msgspec.structs.replace(call, sampling=scored_too)
    return ApiRequest(call, SglangFormatter, options)


def parts_of(body: bytes) -> list[bytes]:
    """Parts a body whose prompts differ in adapter or in how they are drawn: one body for each
    prompt. Empty = all are alike, or there is a stream. Raises RequestError.
    """
    if _HAS_LISTS.search(body) is None:
        return []
    plain = decode_plain(body)
    field = "text" if plain.get("text") else "input_ids"
    prompts = plain.get(field)
    count = (_num_prompts(prompts) or 0) if isinstance(prompts, list) else 0
    lists = {name: given for name, given in plain.items() if isinstance(given, list)}
    if _is_flat(lists.get("token_ids_logprob", [])):
        lists.pop("token_ids_logprob", None)
    each = {name for name in _OF_EACH & lists.keys() if len(lists[name]) == count}
    differ = any(one != lists[name][0] for name in each for one in lists[name])
    if plain.get("stream") or not differ or count > ApiLimits().max_prompts:
        return []
    parts = [plain | {name: lists[name][i] for name in (*each, field)} for i in range(count)]
    for i, part in enumerate(parts):
        if isinstance(plain.get("rid"), str):
            part["rid"] = f"{plain['rid']}_{i}"
    return [encode(part) for part in parts]


def _is_flat(given: list[Any]) -> bool:
    return not any(isinstance(one, list) for one in given)


def joined(answers: Iterable[bytes]) -> bytes:
    """Joins answers to parts as one list."""
    return (
        b"[" + b",".join(answer.removeprefix(b"[").removesuffix(b"]") for answer in answers) + b"]"
    )


def _pictures(
    given: str | list[str | list[str] | None] | None, count: int | None
) -> tuple[tuple[GivenPicture, ...], ...]:
    """Returns the pictures of each prompt; none where no prompt has any. Raises RequestError."""
    if not given:
        return ()
    if count is None:
        alone = [given] if isinstance(given, str) else given
        return (tuple(_picture(one, f"{_IMAGES}[{i}]") for i, one in enumerate(alone)),)
    each = [given] * count if isinstance(given, str) else given
    require(len(each) == count, f"expected images of {count} prompts, got {len(each)}", _IMAGES)
    lists = [one if isinstance(one, list) else [one] if one else [] for one in each]
    return tuple(
        tuple(_picture(one, f"{_IMAGES}[{i}]") for one in images) for i, images in enumerate(lists)
    )


def _picture(given: str | list[str] | None, where: str) -> GivenPicture:
    require(isinstance(given, str), "lists are for several prompts", where)
    return GivenPicture(as_url(str(given)), where)


def _check_fields(plain: dict[str, Any]) -> None:
    """Fields that are not read. Raises RequestError."""
    if plain.get("parameters"):
        raise unsupported("parameters", "use `sampling_params`")
    given = plain.get("sampling_params")
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, dict):
            names = {name: f"sampling_params.{name}" for name in one}
            try:
                check_unknown(one, SglangSampling.__struct_fields__, ())
            except RequestError as error:
                raise error.spelled(names) from None


def _num_prompts(prompt: str | list[Any]) -> int | None:
    """Counts the prompts of a list; None for one prompt that is no list."""
    is_one = isinstance(prompt, str) or any(isinstance(item, int) for item in prompt)
    return None if is_one else len(prompt)


def _alike(given: T | list[T] | list[T | None] | None, count: int | None, param: str) -> T | None:
    """Returns the one value that holds for all prompts. Raises RequestError."""
    if not isinstance(given, list):
        return given
    require(count is not None, "a list is for several prompts", param)
    require(len(given) == count, f"expected {count} values, got {len(given)}", param)
    if any(one != given[0] for one in given):
        raise unsupported(param, "one value for all prompts of a request: send several requests")
    return given[0] if given else None


def _options(body: SglangBody, prompt: str | list[Any], n: int, scored: bool) -> SglangOptions:
    count = _num_prompts(prompt)
    top = _alike(body.top_logprobs_num, count, "top_logprobs_num") or 0
    start = _alike(body.logprob_start_len, count, "logprob_start_len")
    rids = body.rid if isinstance(body.rid, list) else None
    require(rids is None or len(rids) == count, f"expected {count or 'no list of'} ids", "rid")
    return SglangOptions(
        n=n,
        is_list=count is not None or n > 1,
        rid=body.rid if isinstance(body.rid, str) else None,
        rids=tuple(rids or ()),
        top=top if scored else None,
        prompt_from=start if scored and start is not None and start >= 0 else None,
        with_texts=bool(body.return_text_in_logprobs),
        lists=scored and bool(body.token_ids_logprob),
        routed_from=body.routed_experts_start_len or 0,
    )


def _listed(given: list[Any], count: int | None) -> list[int]:
    """Returns the ids that all prompts share; one list is for all. Raises RequestError."""
    if any(isinstance(one, list) for one in given):
        return _alike(given, count, "token_ids_logprob") or []
    return given


def _completion(
    body: SglangBody,
    sampling: SglangSampling,
    prompt: str | list[Any],
    options: SglangOptions,
) -> CompletionsBody:
    """Rewrites a request as a completion's body. Raises RequestError."""
    count = _num_prompts(prompt)
    tag = sampling.structural_tag
    most = sampling.max_new_tokens
    return CompletionsBody(
        prompt=prompt,
        lora_path=_alike(body.lora_path, count, "lora_path"),
        max_tokens=DEFAULT_MAX_TOKENS if most is None else most,
        echo=most == 0,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        include_stop_str_in_output=sampling.no_stop_trim,
        structured_outputs=None if tag is None else StructuredOutputs(structural_tag=tag),
        logprobs=options.top,
        logprob_token_ids=_listed(body.token_ids_logprob or [], count) if options.lists else None,
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt,
        logprobs_mode=body.logprobs_mode,
        return_routed_experts=body.return_routed_experts,
        **{name: getattr(sampling, name) for name in _SAME},
    )


_SAME = tuple(
    name for name in SglangSampling.__struct_fields__ if name in CompletionsBody.__struct_fields__
)
