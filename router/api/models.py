"""What the router tells of itself: models, adapters, info, tokens of a text. Pure."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from adapters.chat.conversation import MessageForm
from router.api.body import decode_body

# Characters of a text. Its tokens take several hundred times as many bytes of memory.
MAX_TOKENIZED = 1 << 19


class ModelObject(msgspec.Struct, frozen=True):
    """The base or a registered adapter, as `/v1/models` lists it. parent: an adapter's base."""

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class Info(msgspec.Struct, frozen=True):
    """LoRAX's fields where they mean something here, and ours.

    message_forms: how the base's chat templates read messages, by their names.
    """

    model_id: str
    model_sha: str
    model_dtype: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_total_tokens: int
    max_lora_rank: int
    max_queue: int
    workers_ready: int
    workers: int
    adapters: list[str]
    version: str
    message_forms: dict[str, MessageForm]
    model_pipeline_tag: Literal["text-generation"] = "text-generation"
    sha: str | None = None
    docker_label: str | None = None


class Health(msgspec.Struct, frozen=True):
    status: Literal["live", "ready"]


class TokenizeBody(msgspec.Struct, frozen=True):
    """A request of `/tokenize`."""

    inputs: Annotated[str, Meta(min_length=1, max_length=MAX_TOKENIZED)]
    add_special_tokens: bool | None = None


class TokenObject(msgspec.Struct, frozen=True):
    """start, stop: characters of the text that the token covers."""

    id: int
    text: str
    start: int
    stop: int


def parse_tokenize(body: bytes) -> tuple[str, bool]:
    """Text, and whether special tokens are added (unless told otherwise). Raises RequestError."""
    request, _ = decode_body(body, TokenizeBody)
    return request.inputs, request.add_special_tokens is not False
