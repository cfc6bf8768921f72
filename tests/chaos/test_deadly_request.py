"""A request that kills each engine that begins it, beside others that do nothing wrong."""

import asyncio
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from loraplex.launcher.demo import adapter_paths, model_path
from tests.certifying.factory import certify
from tests.chaos.load import TIMEOUT_S, Certifier, Clients
from tests.chaos.processes import Fleet, Served, Shape
from tests.router.shared.redis_server import running_redis

DEADLY = "☠"
CLIENTS = 8


def serving(deadly: str) -> Served:
    """The demo, on engines that die of one text."""
    *_, deadly_id = Tokenizer.from_file(str(model_path() / "tokenizer.json")).encode(deadly).ids
    executor = certify(step_s=0.01, eos_percent=1, deadly_id=deadly_id)
    paths = adapter_paths()
    roots = next(iter(paths.values())).parent
    return Served(model_path(), roots, tuple(paths), ("--executor", executor))


async def lost_engines(fleet: Fleet) -> float:
    name = "loraplex_worker_engine_restarts_total"
    return sum([await fleet.metric(worker, name) for worker in fleet.workers])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("workers", "routers"), [(1, 2), (2, 1)])
async def test_it_is_refused_after_a_few_deaths_and_the_others_are_answered(
    tmp_path: Path, workers: int, routers: int
) -> None:
    served = serving(DEADLY)
    async with running_redis() as redis, httpx.AsyncClient(trust_env=False) as http:
        fleet = Fleet(tmp_path, Shape(workers, routers, served=served), redis)
        clients = Clients(fleet.routers, Certifier(served), seed=1)
        try:
            await fleet.start_all()
            await clients.learn()
            load = asyncio.create_task(clients.run(CLIENTS, 10, 120))
            url, body = f"{fleet.routers[0].url}/generate", {"inputs": f"x{DEADLY}"}
            for _ in range(2):
                answer = await http.post(url, json=body, timeout=TIMEOUT_S)
                assert answer.status_code == 500, answer.text
                assert "died of it" in answer.text
                assert 3 <= await lost_engines(fleet) <= 5
            clients.stop()
            await load
        finally:
            await clients.close()
            await fleet.close()
    assert {a.result for a in clients.answers} == {"ok"}, [a.detail for a in clients.answers]
