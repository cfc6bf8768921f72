"""A bounded memory of which worker has seen the beginning of a prompt. Pure."""

from collections.abc import Sequence

from loraplex.adapters.common.newest import NewestKept

MAX_PREFIXES = 1 << 16
_SIZES = (4096, 1024, 256, 64)  # tokens


def prefix_keys(salt: str, adapter: str, prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """One key for each size of beginning that the prompt has, the longest first.

    KV pages are shared within a salt and adapter only, and so are keys. adapter: as of
    `GenerateRequest.acting`.
    """
    return tuple(
        hash((salt, adapter, size, tuple(prompt_ids[:size])))
        for size in _SIZES
        if len(prompt_ids) >= size
    )


def session_key(tenant: str, session: str) -> int:
    """A key of a caller's session: its requests prefer the worker of the last one."""
    return hash((tenant, session))


class PrefixMemory:
    """Latest worker by prefix; the least recently used is forgotten."""

    def __init__(self) -> None:
        self._workers = NewestKept[int, str](MAX_PREFIXES)

    def find(self, keys: Sequence[int]) -> str | None:
        """The worker with the longest of these beginnings."""
        for key in keys:
            worker_id = self._workers.get(key)
            if worker_id is not None:
                return worker_id
        return None

    def remember(self, keys: Sequence[int], worker_id: str) -> None:
        for key in keys:
            self._workers[key] = worker_id
