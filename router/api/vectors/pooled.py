"""Vectors and classes of texts: OpenAI's `/v1/embeddings`, vLLM's `/pooling`, `/classify` in vLLM's
shape and LoRAX's, LoRAX's `/classify_batch`, and the entities that tokens' classes make. Pure."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import decode_plain, only_one_of, require, typed
from loraplex.router.api.request.fields import Off, Positive, adapter_named
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import check_unknown_parts, unsupported
from loraplex.router.api.vectors.embed import EmbedParameters
from loraplex.router.api.vectors.fields import (
    MAX_INPUTS,
    READ_ALONE,
    Encoding,
    InputBody,
    VectorUsage,
    WholeFormatter,
    WrittenAs,
    input_call,
    read_body,
    usage_of,
)
from loraplex.router.call import ChoiceResult, GenerationCall, PromptInfo, VectorCall

# The label of tokens of no entity.
_OUTSIDE = "O"
_BEGIN, _INSIDE = "B", "I"

ClassifyShape = Literal["input", "inputs", "messages"]
_SHAPES: tuple[ClassifyShape, ...] = ("input", "inputs", "messages")
Text = Annotated[str, Meta(min_length=1)]

PromptText = Annotated[str, Meta(max_length=1 << 14)]

_UNSERVED = ("token_embed", "embed&token_classify", "plugin")


class Entity(msgspec.Struct, frozen=True):
    """Neighbouring tokens with one class. entity_group: the class without `B-` or `I-`. score: the
    mean over tokens. start, end: characters of the text.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


def rows_of(numbers: Sequence[float], labels: int) -> list[Sequence[float]]:
    """Divides the numbers of a text into those of its tokens."""
    return [numbers[at : at + labels] for at in range(0, len(numbers), labels)]


def likeliest_of(row: Sequence[float]) -> int:
    return max(range(len(row)), key=row.__getitem__)


def entities(
    text: str, spans: Iterable[tuple[int, int]], tokens: Iterable[tuple[str, float]]
) -> list[Entity]:
    """Finds the entities of a text. spans: characters of each token; what stands for none is left
    out. tokens: label and score of each.
    """
    groups: list[tuple[str, list[tuple[int, int, float]]]] = []
    for (start, stop), (label, score) in zip(spans, tokens, strict=True):
        if start == stop:
            continue
        kind, dash, name = label.partition("-")
        has_kind = bool(dash) and kind in (_BEGIN, _INSIDE)
        group = name if has_kind else label
        begins = has_kind and kind == _BEGIN
        if begins or not groups or groups[-1][0] != group:
            groups.append((group, []))
        groups[-1][1].append((start, stop, score))
    return [_entity(text, group, found) for group, found in groups if group != _OUTSIDE]


def _entity(text: str, group: str, found: Sequence[tuple[int, int, float]]) -> Entity:
    start, end = found[0][0], found[-1][1]
    return Entity(group, fmean(score for *_, score in found), text[start:end], start, end)


class ClassifyBody(InputBody, frozen=True, kw_only=True):
    """Body of vLLM's request to classify texts. activation, softmax: older names of
    use_activation.
    """

    activation: bool | None = None
    softmax: bool | None = None


class LoraxClassifyBody(msgspec.Struct, frozen=True):
    """Body of LoRAX's request to classify a text. stream: of its client; only false."""

    inputs: Text
    parameters: EmbedParameters | None = None
    stream: Off = None


class LoraxClassifyBatchBody(msgspec.Struct, frozen=True):
    """Body of LoRAX's request to classify several texts. stream: of its client; only false."""

    inputs: Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]
    parameters: EmbedParameters | None = None
    stream: Off = None


class ClassObject(msgspec.Struct, frozen=True):
    """A text's classes. label: the likeliest. probs: of all classes, in the model's order. Where
    each token has classes: a list of these for each token.
    """

    index: int
    label: str | list[str]
    probs: Sequence[float | Sequence[float]]
    num_classes: int


class ClassList(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ClassObject]
    usage: VectorUsage
    object: Literal["list"] = "list"


class LabelScore(msgspec.Struct, frozen=True):
    """One class of one text."""

    label: str
    score: float


def shape_of(plain: dict[str, Any]) -> ClassifyShape:
    """Finds which of the known shapes a body has. Raises RequestError unless it is of one shape."""
    return only_one_of(plain, _SHAPES)


def parse_classify(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Reads a request to classify texts, in either API's shape. Raises RequestError."""
    if shape_of(plain) == "inputs":
        return _of_lorax(plain, LoraxClassifyBody, limits, bearer)
    request = read_body(plain, ClassifyBody)
    is_raw = False in (request.use_activation, request.activation, request.softmax)
    vector = VectorCall(use="classes", is_raw=is_raw)
    call = input_call("classify", request, vector, limits, bearer)
    return ApiRequest(call, ClassifyFormatter, WrittenAs(request.request_id))


def parse_classify_batch(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request to classify several texts, in LoRAX's shape. Raises RequestError."""
    return _of_lorax(decode_plain(body), LoraxClassifyBatchBody, limits, bearer)


def _of_lorax(
    plain: dict[str, Any],
    kind: type[LoraxClassifyBody] | type[LoraxClassifyBatchBody],
    limits: ApiLimits,
    bearer: str | None,
) -> ApiRequest:
    check_unknown_parts(plain, kind.__struct_fields__, "")
    inside = plain.get("parameters")
    if isinstance(inside, dict):
        check_unknown_parts(inside, EmbedParameters.__struct_fields__, "parameters.")
    request = typed(plain, kind)
    require(not request.stream, "classes are never streamed", "stream")
    given = request.parameters or EmbedParameters()
    needs = "needs `adapter_id` or `merged_adapters`"
    is_batch = isinstance(request, LoraxClassifyBatchBody)
    call = GenerationCall(
        api="classify",
        prompts=tuple(request.inputs) if is_batch else (str(request.inputs),),
        messages=None,
        adapter=adapter_named(given, given.adapter_id, "adapter_id", limits, bearer, needs),
        sampling=READ_ALONE,
        max_tokens=0,
        vector=VectorCall(use="classes"),
    )
    return ApiRequest(call, LoraxClassifyFormatter, is_batch)


class ClassifyFormatter(WholeFormatter):
    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        head = self._head
        data = [self._object(result) for result in results]
        return ClassList(
            self._options.id_of("classify", head), head.created, head.model, data, usage_of(prompts)
        )

    def _object(self, result: ChoiceResult) -> ClassObject:
        labels, count = self._head.labels, len(self._head.labels)
        rows = rows_of(result.vector, count)
        likeliest = [labels[likeliest_of(row)] for row in rows]
        if self._head.of_tokens:
            return ClassObject(result.prompt_index, likeliest, rows, count)
        return ClassObject(result.prompt_index, likeliest[0], rows[0], count)


class LoraxClassifyFormatter(WholeFormatter):
    """Lists for each text: the likeliest class first, or entities. options: of several texts."""

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        if self._head.of_tokens:
            infos = {info.prompt_index: info for info in prompts}
            found = [self._entities(result, infos[result.prompt_index]) for result in results]
            return found if self._options else found[0]
        lists = [
            sorted(map(LabelScore, self._head.labels, result.vector), key=lambda one: -one.score)
            for result in results
        ]
        return lists if self._options else lists[0]

    def _entities(self, result: ChoiceResult, info: PromptInfo) -> list[Entity]:
        labels = self._head.labels
        rows = rows_of(result.vector, len(labels))
        likeliest = ((labels[likeliest_of(row)], max(row)) for row in rows)
        return entities(info.text, info.spans, likeliest)


class EmbeddingsBody(InputBody, frozen=True, kw_only=True):
    """Body of a request to `/v1/embeddings`. From normalize on: extensions. normalize: another name
    of use_activation. prompt_name, prompt: what is put before each text, by name or as it is.
    """

    dimensions: Positive | None = None
    encoding_format: Encoding | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    prompt: PromptText | None = None


class EmbeddingObject(msgspec.Struct, frozen=True):
    """Vector of one text in an answer. embedding: base64 of little-endian float32, where that was
    asked for.
    """

    index: int
    embedding: Sequence[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(msgspec.Struct, frozen=True):
    id: str
    created: int
    data: list[EmbeddingObject]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse_embeddings(
    plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None
) -> ApiRequest:
    """Reads a request to `/v1/embeddings`. Raises RequestError."""
    request = read_body(plain, EmbeddingsBody)
    check_prompt(request.prompt_name, request.prompt)
    normalises = request.use_activation if request.normalize is None else request.normalize
    agree = request.use_activation in (None, normalises)
    require(agree, "contradicts `normalize`", "use_activation")
    vector = VectorCall(normalises, request.dimensions, request.prompt_name, request.prompt)
    call = input_call("embeddings", request, vector, limits, bearer)
    options = WrittenAs(request.request_id, request.encoding_format or "float")
    return ApiRequest(call, EmbeddingsFormatter, options)


def check_prompt(name: str | None, text: str | None) -> None:
    """Checks that a prompt is given by name or as a text, not both. Raises RequestError."""
    require(name is None or text is None, "give it or `prompt_name`, not both", "prompt")


class EmbeddingsFormatter(WholeFormatter):
    prefix: str = "embd"
    one: Callable[..., Any] = EmbeddingObject
    several: Callable[..., Any] = EmbeddingList

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> Any:
        head, options = self._head, self._options
        data = [self.one(r.prompt_index, self._numbers(r.vector)) for r in results]
        answer_id = options.id_of(self.prefix, head)
        return self.several(answer_id, head.created, data, head.model, usage_of(prompts))

    def _numbers(self, numbers: Sequence[float]) -> Any:
        return self._options.vector(numbers)


class PoolingBody(InputBody, frozen=True, kw_only=True):
    """Body of a request to `/pooling`. task: absent = classes where the base is a classifier, else
    vectors. A model gives classes of texts or of tokens, whatever of both is asked for.
    """

    task: Literal["embed", "classify", "token_classify"] | None = None
    dimensions: Positive | None = None
    encoding_format: Encoding | None = None


class PoolingObject(msgspec.Struct, frozen=True):
    """Numbers of one text in an answer. data: the vector, or a number for each class, where tokens
    have classes a list of these for each; base64 of little-endian float32, where that was asked
    for.
    """

    index: int
    data: Sequence[float | Sequence[float]] | str
    object: Literal["pooling"] = "pooling"


class PoolingList(msgspec.Struct, frozen=True):
    id: str
    created: int
    data: list[PoolingObject]
    model: str
    usage: VectorUsage
    object: Literal["list"] = "list"


def parse_pooling(
    plain: dict[str, Any], limits: ApiLimits, bearer: str | None = None
) -> ApiRequest:
    """Reads a request to `/pooling`. Raises RequestError."""
    if plain.get("task") in _UNSERVED:
        raise unsupported(
            "task",
            "vectors are of whole texts, by `embed`; tokens have classes, by `token_classify`",
        )
    request = read_body(plain, PoolingBody)
    if (request.task or ("classify" if "classes" in limits.gives else "embed")) != "embed":
        require(request.dimensions is None, "classes are as many as they are", "dimensions")
        vector = VectorCall(use="classes", is_raw=request.use_activation is False)
        call = input_call("classify", request, vector, limits, bearer)
    else:
        vector = VectorCall(request.use_activation, request.dimensions)
        call = input_call("embeddings", request, vector, limits, bearer)
    options = WrittenAs(request.request_id, request.encoding_format or "float")
    return ApiRequest(call, PoolingFormatter, options)


class PoolingFormatter(EmbeddingsFormatter):
    prefix, one, several = "pooling", PoolingObject, PoolingList

    def _numbers(self, numbers: Sequence[float]) -> Any:
        if not self._head.of_tokens or self._options.encoding == "base64":
            return self._options.vector(numbers)
        return rows_of(numbers, len(self._head.labels))
