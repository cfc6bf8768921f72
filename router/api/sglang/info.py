"""What SGLang's routes about the server answer. Pure."""

import msgspec

from loraplex.server.protocol import ModelCard


class ServedModel(msgspec.Struct, frozen=True):
    """The base, by SGLang's names. tokenizer_path: its Hub id, if it has one. weight_version: its
    digest."""

    model_path: str
    tokenizer_path: str
    weight_version: str
    is_generation: bool
    preferred_sampling_params: str | None = None


class FleetState(msgspec.Struct, frozen=True):
    """The only entry of `internal_states`."""

    workers: int
    workers_ready: int
    max_running_requests: int


class ServedSettings(msgspec.Struct, frozen=True):
    """Of SGLang's settings those that mean something here."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    dtype: str
    device: str
    max_lora_rank: int
    version: str
    internal_states: list[FleetState]
    enable_lora: bool = True


class LoadedAdapters(msgspec.Struct, frozen=True):
    """loaded_adapters: names that are served, and what they mean."""

    loaded_adapters: dict[str, str]
    success: bool = True
    error_message: str | None = None


def served_model(card: ModelCard) -> ServedModel:
    root = card.root or card.names[0]
    return ServedModel(card.names[0], root, card.base_digest, is_generation=card.writes)


def served_settings(card: ModelCard, version: str, state: FleetState) -> ServedSettings:
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
    )
