"""loraplex serves thousands of LoRA fine-tunes of one base model from the same GPUs.

In a program: `with loraplex.serve(MODEL, adapters={"name": PATH}) as engine: ...`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.engine import Engine, EngineError, RequestFailed, serve
    from loraplex.results import Chunk, Output, OutputChoice, Vector

__all__ = [
    "Chunk",
    "Engine",
    "EngineError",
    "Output",
    "OutputChoice",
    "RequestFailed",
    "Vector",
    "serve",
]


def __getattr__(name: str) -> Any:
    """The programming interface, imported when first used: each process imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from loraplex import engine, results

    return getattr(engine if hasattr(engine, name) else results, name)
