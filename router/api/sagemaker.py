"""SageMaker's `/invocations`: a body of LoRAX's `/`, or of one of OpenAI's routes. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from router.api.errors import Dialect
from router.api.lorax import request as lorax
from router.api.openai import chat, completions
from router.api.openai.chat import ChatBody
from router.api.openai.common import typed_openai
from router.api.openai.completions import CompletionsBody
from router.api.request.body import only_one_of
from router.api.request.formatter import ApiLimits, ApiRequest

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
Shape = Literal["inputs", "prompt", "messages"]
_SHAPES: tuple[Shape, ...] = ("inputs", "prompt", "messages")


class Invocation(msgspec.Struct, frozen=True):
    """What the headers say. adapter: the one that SageMaker's header names. streams: the caller
    takes events."""

    adapter: str | None = None
    streams: bool = False


def shape_of(plain: Mapping[str, Any]) -> Shape:
    """Raises RequestError."""
    return only_one_of(plain, _SHAPES)


def dialect_of(shape: Shape) -> Dialect:
    return "lorax" if shape == "inputs" else "openai"


def parse(
    plain: dict[str, Any], said: Invocation, limits: ApiLimits, bearer: str | None
) -> ApiRequest:
    """Raises RequestError."""
    shape = shape_of(plain)
    asked = dict(plain)
    if said.streams and asked.get("stream") is None:
        asked["stream"] = True
    if shape == "inputs":
        return lorax.parse_plain(_with_parameter(asked, said), limits, bearer, route="/")
    if said.adapter is not None:
        asked["model"] = said.adapter
    if shape == "prompt":
        prompt = typed_openai(asked, CompletionsBody, limits)
        return completions.request_of(prompt, limits, bearer)
    return chat.request_of(typed_openai(asked, ChatBody, limits), limits, bearer)


def _with_parameter(plain: dict[str, Any], said: Invocation) -> dict[str, Any]:
    """The header's adapter is SageMaker's own word: it goes before the body's."""
    inside = plain.get("parameters")
    if said.adapter is None or not isinstance(inside, dict | None):
        return plain
    return plain | {"parameters": {**(inside or {}), "adapter_id": said.adapter}}
