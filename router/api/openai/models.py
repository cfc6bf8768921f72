"""Answers about the router: models, info, health, version. Pure."""

from typing import Literal

import msgspec

from loraplex.adapters.chat.conversation import MessageForm
from loraplex.router.api.ends import EndToken


class ModelObject(msgspec.Struct, frozen=True):
    """A name of the base, or a registered adapter, as `/v1/models` lists it.

    root: what the base is called where it comes from; an adapter's reference. parent: an adapter's
    base. max_model_len: tokens of prompt and output together.
    """

    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelObject]
    object: Literal["list"] = "list"


class Info(msgspec.Struct, frozen=True):
    """LoRAX's fields where they mean something here, and loraplex's own.

    message_forms: how the base's chat templates read messages, by their names.
    ends: tokens that end the base's answers.
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
    ends: list[EndToken]
    model_pipeline_tag: Literal["text-generation"] = "text-generation"
    sha: str | None = None
    docker_label: str | None = None


class Health(msgspec.Struct, frozen=True):
    status: Literal["live", "ready"]


class VersionAnswer(msgspec.Struct, frozen=True):
    version: str
