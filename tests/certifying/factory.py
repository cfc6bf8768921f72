"""The factory by which an engine process gets the certifying executor."""

import json
from pathlib import Path
from typing import Any

import msgspec

from loraplex.server.config import ConfigError, EngineConfig
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.ops.memory import picture_limits
from tests.certifying.certificates import CertifyOptions
from tests.certifying.executor import CertifyingExecutor

_TOKEN_BYTES = 1024


def certify(**options: Any) -> str:
    """Value of `--executor` for an engine with these `CertifyOptions`."""
    return f"{__name__}:make:{json.dumps(options)}"


def make(config: EngineConfig, memory: memoryview, given: str) -> CertifyingExecutor:
    """Executor with the model's vocabulary and context, if a model is there.

    given: `CertifyOptions` as JSON, or nothing. Raises ConfigError.
    """
    path = Path(config.model_path) / "config.json"
    model = json.loads(path.read_text()) if path.is_file() else {}
    eos = model.get("eos_token_id")
    defaults = {
        "vocab_size": model.get("vocab_size", 512),
        "eos_token_ids": eos if isinstance(eos, list) else [2 if eos is None else eos],
    }
    try:
        asked = msgspec.json.decode(given or "{}", type=dict[str, Any])
        options = msgspec.convert({**defaults, **asked}, CertifyOptions)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--executor: {error} in {given!r}") from None
    num_pages = max(1, config.kv_memory // (config.page_size * _TOKEN_BYTES))
    text = model.get("text_config", model)
    context = config.max_context or text.get("max_position_embeddings", 2048)
    context = min(context, num_pages * config.page_size)
    pictures = None
    if "vision_config" in model:
        pictures = picture_limits(read_config(path.parent), config, context)
    limits = ExecutorLimits(
        num_pages=num_pages,
        page_size=config.page_size,
        max_rows=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_context=context,
        vocab_size=options.vocab_size,
        eos_token_ids=options.eos_token_ids,
        adapter_slots=config.adapter_slots,
        arena_extents=config.adapter_memory // config.extent_bytes,
        extent_bytes=config.extent_bytes,
        max_decodes=config.max_decodes,
        host_pages=config.host_kv_memory // (config.page_size * _TOKEN_BYTES),
        disk_pages=config.disk_kv // (config.page_size * _TOKEN_BYTES),
        pictures=pictures,
    )
    return CertifyingExecutor(limits, options, memory)
