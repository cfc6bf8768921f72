"""The host arena's pages are made beside a start, and are nobody's loss."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from loraplex.server.engine import shared_memory
from loraplex.server.engine.shared_memory import HostMemory, map_shared, pages_made

_BYTES = 6 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_TOUCHED_BYTES", 1 << 20)


def made(memory: HostMemory) -> int:
    """Bytes that it has pages for."""
    return os.fstat(memory.fd).st_blocks * 512


def test_all_pages_are_there_in_the_end() -> None:
    memory = HostMemory(_BYTES)
    memory.view[:4] = b"kept"
    assert made(memory) < _BYTES
    engine = map_shared(memory.fd, _BYTES)
    with pages_made(engine, 2):
        memory.view[-4:] = b"also"
    assert made(memory) >= _BYTES
    assert (bytes(memory.view[:4]), bytes(memory.view[-4:])) == (b"kept", b"also")
    assert not any(memory.view[4:-4])


class _Slow(ThreadPoolExecutor):
    """Begins when it is told to end."""

    _ending = Event()

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        def held() -> Any:
            self._ending.wait()
            return function(*args, **options)

        return super().submit(held)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        self._ending.set()
        super().shutdown(wait)


def test_an_error_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "ThreadPoolExecutor", _Slow)
    memory = HostMemory(_BYTES)
    with pytest.raises(ValueError, match="too little"), pages_made(memory.view, 1):
        raise ValueError("too little memory")
    assert made(memory) < _BYTES


def test_no_memory_has_no_pages() -> None:
    with pages_made(map_shared(HostMemory(0).fd, 0), 1):
        pass
