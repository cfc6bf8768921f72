"""Answers about the router: models, info, health, version, load; SGLang's as well. Pure."""

import json
from typing import Literal

import msgspec

from loraplex.adapters.chat.conversation import MessageForm
from loraplex.router.api.admin.adapters import EndToken
from loraplex.router.api.vllm.control import VllmConfig
from loraplex.server.protocol import ModelCard


class ModelObject(msgspec.Struct, frozen=True):
    """A name of the base, or a registered adapter, as `/v1/models` lists it.

    root: what the base is called where it comes from; an adapter's reference. parent: an adapter's
    base; "" = not known yet which of several. max_model_len: tokens of prompt and output together.
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


class ServedModel(msgspec.Struct, frozen=True):
    """The base, by SGLang's names. tokenizer_path: its Hub id, if it has one. weight_version: its
    digest."""

    model_path: str
    tokenizer_path: str
    weight_version: str
    is_generation: bool
    preferred_sampling_params: str | None = None


class FleetState(msgspec.Struct, frozen=True):
    """State of the fleet: the only entry of `internal_states`."""

    workers: int
    workers_ready: int
    max_running_requests: int


class ServedSettings(msgspec.Struct, frozen=True):
    """SGLang's settings, as far as they mean something here. vllm_config: vLLM's."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    dtype: str
    device: str
    max_lora_rank: int
    version: str
    internal_states: list[FleetState]
    vllm_config: VllmConfig
    enable_lora: bool = True


class LoadedAdapters(msgspec.Struct, frozen=True):
    """Answers which adapters are served, by their names. loaded_adapters: names that are served,
    and what they mean.
    """

    loaded_adapters: dict[str, str]
    success: bool = True
    error_message: str | None = None


def served_model(card: ModelCard) -> ServedModel:
    root = card.root or card.names[0]
    return ServedModel(card.names[0], root, card.base_digest, is_generation=card.writes)


def served_settings(
    card: ModelCard, version: str, state: FleetState, config: VllmConfig
) -> ServedSettings:
    return ServedSettings(
        model_path=card.names[0],
        tokenizer_path=card.root or card.names[0],
        served_model_name=card.names[0],
        context_length=card.max_context,
        dtype=card.dtype,
        device=card.device,
        max_lora_rank=card.max_lora_rank,
        version=version,
        internal_states=[state],
        vllm_config=config,
    )


LOAD_FORMAT = "endpoint-load-metrics-format"


def load_headers(form: str, waiting: float, kv_usage: float) -> dict[str, str]:
    """The answer's header with the workers' load. form: TEXT or JSON; any other gets none."""
    numbers = {"kv_cache_usage_perc": kv_usage, "num_requests_waiting": waiting}
    written = {
        "TEXT": ", ".join(f"named_metrics.{name}={value}" for name, value in numbers.items()),
        "JSON": json.dumps({"named_metrics": numbers}),
    }
    kind = form.upper()
    return {"endpoint-load-metrics": f"{kind} {written[kind]}"} if kind in written else {}
