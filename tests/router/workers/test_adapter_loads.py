"""Orders of one worker connection whose callers leave."""

import asyncio

import pytest

from loraplex.router.workers.loads import ConnectionOrders
from loraplex.server.protocol import AdapterOrder, OrderAction


@pytest.mark.parametrize(("action", "withdrawn"), [("load", True), ("evict", False)])
async def test_a_load_is_withdrawn_when_its_caller_leaves(
    action: OrderAction, withdrawn: bool
) -> None:
    sent: list[AdapterOrder] = []
    orders = ConnectionOrders(sent.append)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(orders.order(action, ["a"]), 0.001)
    withdrawal = [AdapterOrder("o0", "withdraw", ())] if withdrawn else []
    assert sent == [AdapterOrder("o0", action, ("a",)), *withdrawal]


async def test_a_caller_who_leaves_a_lost_connection_hears_of_nothing_else() -> None:
    lost = False

    def send(order: AdapterOrder) -> None:
        if lost:
            raise ConnectionError("it is gone")

    orders = ConnectionOrders(send)
    waiting = asyncio.create_task(orders.order("load", ["a"]))
    await asyncio.sleep(0)
    lost = True
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
