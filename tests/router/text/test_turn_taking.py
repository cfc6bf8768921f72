"""So much at once, in order, whoever leaves meanwhile."""

import asyncio
import threading
from collections import Counter

import pytest

from loraplex.adapters.common.turns import Room
from loraplex.router.call import RequestError
from loraplex.router.text.turn_taking import INLINE_SIZE, CallersTurns, TurnTaking

LONG = INLINE_SIZE + 1


def taking(size: int, of_one: int | None = None, line: int = 100) -> TurnTaking:
    rooms = Room(size, size if of_one is None else of_one, line)
    return TurnTaking({"text": rooms, "template": Room(1, 1, line)})


def turns_for(size: int) -> CallersTurns:
    return taking(size).of("")


class Work:
    """It lasts until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> int:
        self.begun.set()
        assert self.let_go.wait(240)
        return threading.get_ident()

    def parse(self, _: bytes) -> int:
        return self()


def thread(_: bytes) -> int:
    return threading.get_ident()


async def begins(work: Work) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, work.begun.wait, 30)


async def settled() -> None:
    """What could begin has begun."""
    for _ in range(8):
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)


async def test_short_work_is_done_here() -> None:
    assert await turns_for(LONG).run(INLINE_SIZE, threading.get_ident) == threading.get_ident()


async def test_so_much_at_once_and_in_order() -> None:
    texts = turns_for(2 * LONG)
    works = [Work() for _ in range(4)]
    sizes = [LONG, LONG, 10 * LONG, LONG]
    asking = [asyncio.create_task(texts.run(*each)) for each in zip(sizes, works, strict=True)]
    await begins(works[0])
    await begins(works[1])
    works[0].let_go.set()
    assert await asking[0] != threading.get_ident()
    await settled()
    assert not works[2].begun.is_set(), "it is larger than what there is room for: it goes alone"
    assert not works[3].begun.is_set(), "small ones do not overtake it"
    works[1].let_go.set()
    await begins(works[2])
    await settled()
    assert not works[3].begun.is_set()
    works[2].let_go.set()
    works[3].let_go.set()
    await asyncio.gather(*asking)


async def test_bodies_of_many_values_are_read_apart_and_one_at_a_time() -> None:
    bodies = TurnTaking()
    one, other = Work(), Work()
    assert await bodies.of("a").parsed(b'"%s"' % (b"x" * LONG), thread) == threading.get_ident()
    asking = [
        asyncio.create_task(bodies.of(tenant).parsed(b"[%s]" % (b"1," * LONG), work.parse))
        for tenant, work in (("a", one), ("b", other))
    ]
    await begins(one)
    await settled()
    assert not other.begun.is_set()
    one.let_go.set()
    await begins(other)
    other.let_go.set()
    assert threading.get_ident() not in await asyncio.gather(*asking)


async def test_lists_are_made_one_at_a_time_and_others_have_their_turn_meanwhile() -> None:
    lists, turns, made = TurnTaking(), 0, list[tuple[str, int]]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def listed(tenant: str) -> list[int]:
        def make(number: int) -> int | None:
            made.append((tenant, turns))
            return number if number % 2 else None

        return await lists.of(tenant).listed(range(320), make)

    beside = asyncio.create_task(others())
    one, other = await asyncio.gather(listed("a"), listed("b"))
    assert one == other == [*range(1, 320, 2)]
    beside.cancel()
    assert [tenant for tenant, _ in made] == ["a"] * 320 + ["b"] * 320
    assert max(Counter(turn for _, turn in made).values()) <= 32


async def test_who_leaves_while_it_waits_holds_nobody_up() -> None:
    texts = turns_for(2 * LONG)
    first, large, small = Work(), Work(), Work()
    asking = asyncio.create_task(texts.run(LONG, first))
    await begins(first)
    leaving = asyncio.create_task(texts.run(2 * LONG, large))
    staying = asyncio.create_task(texts.run(LONG, small))
    await settled()
    leaving.cancel()
    await begins(small)
    for work in (first, small):
        work.let_go.set()
    await asyncio.gather(asking, staying)
    assert not large.begun.is_set()


async def test_work_whose_caller_left_takes_its_room_until_it_ends() -> None:
    texts = turns_for(LONG)
    first, second = Work(), Work()
    leaving = asyncio.create_task(texts.run(LONG, first))
    await begins(first)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    asking = asyncio.create_task(texts.run(LONG, second))
    await settled()
    assert not second.begun.is_set()
    first.let_go.set()
    second.let_go.set()
    await asking


async def test_what_work_raises_is_its_callers() -> None:
    texts = turns_for(LONG)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await texts.run(LONG, lambda: 1 // 0)


async def test_lines_take_turns() -> None:
    texts = taking(LONG)
    works = [Work() for _ in range(5)]
    askers = [*(texts.of("a") for _ in range(3)), texts.of("b", is_batch=True), texts.of("b")]
    asking = [
        asyncio.create_task(asker.run(LONG, work))
        for asker, work in zip(askers, works, strict=True)
    ]
    for number, place in enumerate((0, 1, 4, 2, 3)):
        await begins(works[place])
        await settled()
        assert sum(work.begun.is_set() for work in works) == number + 1
        works[place].let_go.set()
    await asyncio.gather(*asking)


async def test_a_turn_that_came_to_one_who_left_goes_on() -> None:
    """It is cancelled in the very moment in which it may begin."""
    templates = taking(LONG).of("")
    entered = list[str]()
    left = asyncio.Event()

    async def render(name: str) -> None:
        async with templates.take("template"):
            entered.append(name)
            if name == "first":
                await left.wait()

    first, second, third = (
        asyncio.create_task(render(name)) for name in ("first", "second", "third")
    )
    await settled()
    left.set()
    second.cancel()
    await asyncio.gather(first, third)
    assert entered == ["first", "third"]
    assert second.cancelled()


async def test_a_full_line_is_refused() -> None:
    templates = taking(LONG, line=1).of("a")
    async with templates.take("template"):
        waiting = asyncio.create_task(templates.run_apart("template", 1, lambda: "done"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refused:
            async with templates.take("template"):
                raise AssertionError
        assert refused.value.cause == "overloaded"
    assert await waiting == "done"
