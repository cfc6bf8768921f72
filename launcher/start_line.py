"""How far `loraplex serve` is while its workers load, as a line of a terminal. Pure."""

from collections.abc import Sequence

from loraplex.server.engine.messages import StartProgress

_WIDTH = 20


def start_line(waiting: Sequence[StartProgress], workers: int, seconds: float) -> str:
    """waiting: workers that are not ready, of `workers`. seconds: since the start."""
    if not waiting:
        return f"starting the router, {seconds:.0f} s"
    slowest = min(waiting, key=_share)
    filled = round(_WIDTH * _share(slowest))
    bar = f" [{'#' * filled}{'-' * (_WIDTH - filled)}]" if slowest.total else ""
    ready = f", {workers - len(waiting)} of {workers} workers ready" if workers > 1 else ""
    return f"{slowest}{bar}, {seconds:.0f} s{ready}"


def _share(progress: StartProgress) -> float:
    return min(progress.done / progress.total, 1.0) if progress.total else 0.0
