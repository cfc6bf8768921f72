"""A command that runs services until a signal stops it: signals, the first words, the end."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from loraplex.launcher.serving.processes import say

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervised(Protocol):
    """A service that runs until it is stopped, or ends by itself."""

    async def run(self) -> None: ...

    def kill(self) -> None: ...


async def run_services(
    services: Sequence[Supervised],
    announce: Callable[[], Coroutine[Any, Any, None]],
    stop_all: Callable[[], Awaitable[None]],
) -> bool:
    """Run until a signal, or a service's end; then `stop_all`. A second signal kills at once, and
    False is returned.

    announce: runs beside the services, and reports when they are ready. Raises ChildFailed.
    """
    stop = asyncio.Event()
    is_killed = False

    def on_signal() -> None:
        nonlocal is_killed
        if not stop.is_set():
            stop.set()
            say("stopping; once more to stop at once")
            return
        is_killed = True
        for service in services:
            service.kill()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    tasks: list[asyncio.Task[Any]] = [
        *(asyncio.create_task(service.run()) for service in services),
        asyncio.create_task(stop.wait()),
    ]
    announcing = asyncio.create_task(announce())
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        announcing.cancel()
        await stop_all()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, announcing, return_exceptions=True)
    for task in done:
        task.result()
    return not is_killed
