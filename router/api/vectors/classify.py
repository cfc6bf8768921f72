"""`/classify` in vLLM's shape and in LoRAX's, and LoRAX's `/classify_batch`. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import decode_plain, only_one_of, require, typed
from loraplex.router.api.request.fields import Off, adapter_named
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import check_unknown_parts
from loraplex.router.api.vectors.embed import EmbedParameters
from loraplex.router.api.vectors.entities import Entity, entities, likeliest_of, rows_of
from loraplex.router.api.vectors.fields import (
    MAX_INPUTS,
    READ_ALONE,
    InputBody,
    VectorUsage,
    WholeFormatter,
    WrittenAs,
    input_call,
    read_body,
    usage_of,
)
from loraplex.router.call import ChoiceResult, GenerationCall, PromptInfo, VectorCall

ClassifyShape = Literal["input", "inputs", "messages"]
_SHAPES: tuple[ClassifyShape, ...] = ("input", "inputs", "messages")
Text = Annotated[str, Meta(min_length=1)]


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


def parse_plain(plain: dict[str, Any], limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Reads a request to classify texts, in either API's shape. Raises RequestError."""
    if shape_of(plain) == "inputs":
        return _of_lorax(plain, LoraxClassifyBody, limits, bearer)
    request = read_body(plain, ClassifyBody)
    is_raw = False in (request.use_activation, request.activation, request.softmax)
    vector = VectorCall(use="classes", is_raw=is_raw)
    call = input_call("classify", request, vector, limits, bearer)
    return ApiRequest(call, ClassifyFormatter, WrittenAs(request.request_id))


def parse_batch(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
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
