"""Work that all who want it at the same time share."""

import asyncio

from loraplex.router.shared_tasks import SharedTasks


async def test_it_goes_on_when_the_first_leaves_and_is_shared_once() -> None:
    shared, gate, begun = SharedTasks[str, int](), asyncio.Event(), list[int]()

    async def work() -> int:
        begun.append(len(begun))
        await gate.wait()
        return begun[-1]

    first, second = (asyncio.create_task(shared.run("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    gate.set()
    assert (await second, first.cancelled(), len(shared)) == (0, True, 0)
    assert await shared.run("a", work) == 1


async def test_a_failure_is_shared_and_not_kept() -> None:
    shared, fails = SharedTasks[str, int](), [ValueError("once")]

    async def work() -> int:
        await asyncio.sleep(0)
        if fails:
            raise fails.pop()
        return 7

    both = await asyncio.gather(*(shared.run("a", work) for _ in range(2)), return_exceptions=True)
    assert both[0] is both[1]
    assert isinstance(both[0], ValueError)
    assert await shared.run("a", work) == 7
