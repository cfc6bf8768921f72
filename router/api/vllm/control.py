"""vLLM's routes for trainers: what its configuration says, pauses, the world's size. Pure."""

from collections.abc import Mapping
from typing import Literal, cast, get_args

import msgspec

from loraplex.router.api.request.body import require
from loraplex.router.call import RequestError
from loraplex.server.protocol import ModelCard

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)
PAUSE_QUERY = ("mode", "clear_cache")


class PauseState(msgspec.Struct, frozen=True):
    """Answers a change. status: `resumed` also answers a pause that another request has ended."""

    status: Literal["paused", "resumed"]


class IsPaused(msgspec.Struct, frozen=True):
    is_paused: bool


class WorldSize(msgspec.Struct, frozen=True):
    """GPUs that share the model. Workers with copies of the model do not count."""

    world_size: int


class VllmModelConfig(msgspec.Struct, frozen=True):
    """dtype: of the weights, as torch spells it."""

    model: str
    served_model_name: list[str]
    dtype: str
    max_model_len: int
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]


class VllmLoraConfig(msgspec.Struct, frozen=True):
    """max_loras: adapters that each worker's device may hold at once."""

    max_lora_rank: int
    max_loras: int


class VllmParallelConfig(msgspec.Struct, frozen=True):
    """data_parallel_size: 1, as a load reaches all workers."""

    tensor_parallel_size: int
    world_size: int
    data_parallel_size: int = 1


class VllmConfig(msgspec.Struct, frozen=True):
    """The part of vLLM's configuration that trainers read. lora_config: null while no worker has
    said how many adapters it holds. weight_transfer_config: weights of the base do not change.
    """

    model_config: VllmModelConfig
    lora_config: VllmLoraConfig | None
    parallel_config: VllmParallelConfig
    weight_transfer_config: None = None


def vllm_config(
    card: ModelCard, processed_logprobs: bool, adapter_slots: int, shards: int
) -> VllmConfig:
    """Describes the server. adapter_slots: of the worker with the fewest; 0 = not known. shards:
    GPUs that share the model.
    """
    return VllmConfig(
        model_config=VllmModelConfig(
            model=card.root or card.names[0],
            served_model_name=list(card.listed or card.names[:1]),
            dtype=f"torch.{card.dtype}",
            max_model_len=card.max_context,
            logprobs_mode="processed_logprobs" if processed_logprobs else "raw_logprobs",
        ),
        lora_config=VllmLoraConfig(card.max_lora_rank, adapter_slots) if adapter_slots else None,
        parallel_config=VllmParallelConfig(shards, shards),
    )


def pause_mode(query: Mapping[str, str]) -> PauseMode:
    """Reads the mode of a pause; vLLM's own default is `abort`. Raises RequestError."""
    mode = query.get("mode", "abort")
    require(
        mode in PAUSE_MODES, f"expected one of {', '.join(PAUSE_MODES)}; got {mode!r:.40}", "mode"
    )
    return cast(PauseMode, mode)


def check_alone(router_processes: int) -> None:
    """Checks that a pause of this process holds for the whole port. Raises RequestError."""
    if router_processes > 1:
        message = (
            f"{router_processes} router processes share this port, and a pause would hold in one "
            "of them: start the router with --router-processes 1"
        )
        raise RequestError("conflict", message)
