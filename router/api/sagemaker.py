"""SageMaker's `/invocations`: a body of LoRAX's `/`, of one of OpenAI's routes, or of a route that
reads texts. Pure."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import msgspec

from loraplex.router.api.errors import Dialect
from loraplex.router.api.lorax import request as lorax
from loraplex.router.api.openai import chat, completions
from loraplex.router.api.openai.chat import ChatBody
from loraplex.router.api.openai.common import typed_openai
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.request.body import only_one_of
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import ELSEWHERE, unsupported
from loraplex.router.api.vectors import fits, pooled

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
SESSION_HEADER = "x-amzn-sagemaker-session-id"
Shape = Literal["inputs", "prompt", "messages", "input", "query", "queries", "text_1", "data_1"]
_SHAPES: tuple[Shape, ...] = get_args(Shape)
_NO_SESSION = "answers keep no state: send the whole conversation, whose prefix is found again"


class Invocation(msgspec.Struct, frozen=True):
    """Headers of a request. adapter: the one that SageMaker's header names. streams: the caller
    takes events. has_session: SageMaker's header names one.
    """

    adapter: str | None = None
    streams: bool = False
    has_session: bool = False


def shape_of(plain: Mapping[str, Any]) -> Shape:
    """Finds in which API's shape a body is written. Raises RequestError."""
    if plain.get("requestType") is not None:
        raise unsupported("requestType", _NO_SESSION)
    return only_one_of(plain, _SHAPES)


def dialect_of(shape: Shape) -> Dialect:
    return "lorax" if shape == "inputs" else "openai"


def parse(
    plain: dict[str, Any], said: Invocation, limits: ApiLimits, bearer: str | None
) -> ApiRequest:
    """Reads a body by the API whose shape it has. Raises RequestError."""
    shape = shape_of(plain)
    if said.has_session:
        raise unsupported(SESSION_HEADER, _NO_SESSION)
    asked = dict(plain)
    read = _reader(shape, plain, limits)
    if said.streams and read is None and asked.get("stream") is None:
        asked["stream"] = True
    if shape == "inputs":
        return lorax.parse_plain(_with_parameter(asked, said), limits, bearer, route="/")
    if said.adapter is not None:
        asked["model"] = said.adapter
    if read is not None:
        return read(asked, limits, bearer)
    if shape == "prompt":
        prompt = typed_openai(asked, CompletionsBody, limits)
        return completions.request_of(prompt, limits, bearer)
    return chat.request_of(typed_openai(asked, ChatBody, limits), limits, bearer)


def _reader(
    shape: Shape, plain: dict[str, Any], limits: ApiLimits
) -> Callable[[dict[str, Any], ApiLimits, str | None], ApiRequest] | None:
    """The parser of a body whose texts are read for numbers; None where answers are wanted."""
    if shape == "query":
        return partial(fits.parse_rerank, version=1)
    if shape in ("queries", "text_1", "data_1"):
        return fits.parse_score
    if not ELSEWHERE["task"].asks_for_nothing(plain.get("task")):
        return pooled.parse_pooling
    if shape == "input" or (shape == "messages" and "text" not in limits.gives):
        return pooled.parse_classify if "classes" in limits.gives else pooled.parse_embeddings
    return None


def _with_parameter(plain: dict[str, Any], said: Invocation) -> dict[str, Any]:
    """Puts the header's adapter into the body, before the body's own: it is SageMaker's."""
    inside = plain.get("parameters")
    if said.adapter is None or not isinstance(inside, dict | None):
        return plain
    return plain | {"parameters": {**(inside or {}), "adapter_id": said.adapter}}
