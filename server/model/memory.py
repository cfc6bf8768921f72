"""How an engine's memory options turn into pages, extents and a context length. Pure arithmetic."""

from adapters.manifest import SlabDtype
from server.config import EngineConfig
from server.engine.executor import ExecutorLimits
from server.model.config import ModelConfig

ITEM_BYTES: dict[SlabDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def page_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Keys and values of one page in all layers."""
    tokens = model.num_layers * engine.page_size
    return 2 * tokens * model.kv_size * ITEM_BYTES[engine.dtype]


def executor_limits(model: ModelConfig, engine: EngineConfig) -> ExecutorLimits:
    """Raises ValueError naming the option that is too small, with the value that would do."""
    page = page_bytes(model, engine)
    num_pages = engine.kv_memory // page
    if num_pages < 1:
        raise ValueError(f"kv_memory is {engine.kv_memory} bytes; one page alone takes {page}")
    room = num_pages * engine.page_size
    extents = engine.adapter_memory // engine.extent_bytes
    if engine.adapter_slots > 0 and extents < 1:
        raise ValueError(
            f"adapter_memory is {engine.adapter_memory} bytes; at least {engine.extent_bytes}"
            " (one extent) are needed"
        )
    return ExecutorLimits(
        num_pages=num_pages,
        page_size=engine.page_size,
        max_rows=engine.max_running,
        max_step_tokens=engine.max_step_tokens,
        max_context=_max_context(model, engine, room, page),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        adapter_slots=engine.adapter_slots,
        arena_extents=extents,
        extent_bytes=engine.extent_bytes,
    )


def _max_context(model: ModelConfig, engine: EngineConfig, room: int, page: int) -> int:
    """What was asked for must fit; what was not asked for is cut to what fits."""
    if engine.max_context is None:
        return min(model.max_context, room)
    if engine.max_context > model.max_context:
        raise ValueError(
            f"max_context is {engine.max_context}; the model reaches {model.max_context} tokens"
        )
    if engine.max_context > room:
        needed = -(-engine.max_context // engine.page_size) * page
        raise ValueError(
            f"kv_memory is {engine.kv_memory} bytes, enough for {room} tokens; max_context"
            f" {engine.max_context} takes {needed}"
        )
    return engine.max_context
