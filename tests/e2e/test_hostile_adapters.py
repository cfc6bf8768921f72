"""Hostile adapter folders against the real server: refused, while neighbours' answers stay."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from loraplex.launcher.demo import BASE_NAME, EXAMPLES, model_path
from loraplex.server.model.card import read_base_spec
from tests.adapters.hostile import cases
from tests.adapters.spoils import UNPICKLED, write_good
from tests.e2e.serving import Serving
from tests.grids import beyond

BASE = read_base_spec(model_path(), (BASE_NAME,))
NEIGHBOURS = ("json", "pirate", "")


def processes(serving: Serving) -> set[int]:
    return {child.pid for child in psutil.Process(serving.process.pid).children(recursive=True)}


def neighbour(client: httpx.Client, adapter: str) -> object:
    parameters = {"adapter_id": adapter, "max_new_tokens": 24, "details": True}
    body = {"inputs": EXAMPLES[0], "parameters": parameters}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


@contextmanager
def neighbours(serving: Serving) -> Iterator[None]:
    """Generates all the while; afterwards every answer must have been the first one."""
    with httpx.Client(base_url=serving.url, timeout=240) as client:
        expected = {name: neighbour(client, name) for name in NEIGHBOURS}
        assert len({str(tokens) for tokens in expected.values()}) == len(NEIGHBOURS)
        done, answered = threading.Event(), threading.Semaphore(0)

        def generate(name: str) -> None:
            while not done.is_set():
                assert neighbour(client, name) == expected[name]
                answered.release()

        with ThreadPoolExecutor(len(NEIGHBOURS)) as pool:
            asking = [pool.submit(generate, name) for name in NEIGHBOURS]
            try:
                yield
                for _ in NEIGHBOURS:
                    assert answered.acquire(timeout=240)
            finally:
                done.set()
            for ask in asking:
                ask.result()


def refused_as(client: httpx.Client, folder: Path) -> set[str]:
    """The codes of its violations; of another refusal than 422, its kind."""
    body = {"inputs": "x", "parameters": {"adapter_id": f"local:{folder}", "max_new_tokens": 1}}
    answer = client.post("/generate", json=body)
    assert 400 <= answer.status_code < 500, answer.text
    found = answer.json()
    assert found["error"].replace("\n", "").isprintable()
    return {violation["code"] for violation in found.get("violations", ())} or {found["error_type"]}


@pytest.mark.parametrize("step", beyond(1, [8, 1]))
def test_each_is_refused_and_nobody_else_notices(
    serving: Serving, http: httpx.Client, adapter_root: Path, step: int
) -> None:
    """`tests/adapters` has all of them refused in process."""
    hostile = cases(BASE)
    assert len(hostile) >= 300
    before = processes(serving)
    root, others = adapter_root / f"hostile-{step}", dict[str, set[str]]()
    with neighbours(serving):
        for number, (name, (spoil, expected)) in enumerate([*hostile.items()][::step]):
            folder = write_good(root / str(number), BASE)
            spoil(folder)
            found = refused_as(http, folder)
            also = {"escaping_link", "adapter_not_found", "adapter_too_large"}
            if not found <= expected | also:
                others[name] = found
            shutil.rmtree(folder)
        good = write_good(root / "good", BASE)
        body = {"inputs": "x", "parameters": {"adapter_id": f"local:{good}", "max_new_tokens": 1}}
        assert http.post("/generate", json=body).status_code == 200
    assert not others, "refused otherwise"
    assert processes(serving) == before
    assert not UNPICKLED.exists()
