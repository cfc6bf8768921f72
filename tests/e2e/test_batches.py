"""`/v1/batches` of a served demo that is killed: every line has one answer, adapters are
loaded one after the other, and live requests go first."""

import json
import random
import re
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import Serving, start_serving

PATIENCE_S = 240.0  # between two signs of progress
ADAPTERS = 20
ROUTE: Any = "/v1/chat/completions"
LIVE_ALONE = 10
BAD = 5


def make_adapters(folder: Path) -> dict[str, Path]:
    """Content of their own: those of the demo, each at several strengths."""
    originals = sorted(adapter_paths().items())
    made = {}
    for number in range(ADAPTERS):
        name, path = originals[number % len(originals)]
        target = folder / f"{name}-{number:02}"
        target.mkdir(parents=True)
        for file in path.iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        config = json.loads((target / "adapter_config.json").read_text())
        config["lora_alpha"] += number
        (target / "adapter_config.json").write_text(json.dumps(config))
        made[target.name] = target
    return made


def make_lines(count: int, names: list[str]) -> bytes:
    """Adapters and texts are drawn; some lines are bad."""
    drawn = random.Random(5)
    texts = []
    for number in range(count):
        messages = [{"role": "user", "content": drawn.choice(EXAMPLES)}]
        body = {"model": drawn.choice(names), "messages": messages, "max_tokens": 4}
        if number % (count // BAD) == 7:
            body["top_p"] = 7
        said = {"custom_id": f"{number}", "method": "POST", "url": ROUTE, "body": body}
        texts.append(json.dumps(said))
    return "\n".join(texts).encode()


class LiveCaller:
    """One live request after the other, on the base, and how long each waits for its first
    token."""

    def __init__(self, url: str) -> None:
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        self._model = self._client.models.list().data[0].id
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def ask(self) -> None:
        began = last = time.perf_counter()
        stream = self._client.completions.create(
            model=self._model, prompt=EXAMPLES[0], max_tokens=8, stream=True
        )
        for number, _ in enumerate(stream):
            now = time.perf_counter()
            (self.gaps_s if number else self.first_s).append(now - (last if number else began))
            last = now

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.ask()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def until_answered(server: Serving, batch_id: str, count: int) -> str:
    """The batch's status once so many lines have an answer, or it is over."""
    seen, deadline = -1, time.monotonic() + PATIENCE_S
    api = client(server)
    while True:
        batch = api.batches.retrieve(batch_id)
        assert batch.request_counts is not None
        done = batch.request_counts.completed + batch.request_counts.failed
        if done >= count or batch.status in ("completed", "failed", "expired"):
            return batch.status
        if done > seen:
            seen, deadline = done, time.monotonic() + PATIENCE_S
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        time.sleep(0.25)  # polls a condition, bounded by the deadline


def order_of(log: Path, names: list[str]) -> list[str]:
    """Adapters of answered requests, one after the other."""
    asked = re.findall(r"gen_ai\.request\.model=(\S+)", log.read_text())
    return [name for name in asked if name in names]


def switches(order: list[str]) -> int:
    return sum(one != other for one, other in pairwise(order))


@pytest.mark.parametrize(
    ("count", "kills"), [(40, 1), pytest.param(10_000, 2, marks=pytest.mark.exhaustive)]
)
def test_killed_and_every_line_is_answered_once(tmp_path: Path, count: int, kills: int) -> None:
    adapters = make_adapters(tmp_path / "adapters")
    options = ["--adapter-root", str(tmp_path / "adapters")]
    options += ["--cache-dir", str(tmp_path / "cache")]
    for name, path in adapters.items():
        options += ["--adapter", f"{name}={path}"]
    options += ["--files-dir", str(tmp_path / "files"), "--log-requests", "yes"]
    batch_id, alone, beside, orders = "", list[float](), list[float](), list[list[str]]()
    gaps: list[float] = []
    for run in range(kills + 1):
        server = start_serving(*options, log=tmp_path / f"log-{run}")
        live = LiveCaller(server.url)
        try:
            if not run:
                for _ in range(LIVE_ALONE):
                    live.ask()
                alone, live.first_s = live.first_s[1:], []
                file = client(server).files.create(
                    file=("in.jsonl", make_lines(count, list(adapters))), purpose="batch"
                )
                batch_id = (
                    client(server)
                    .batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h")
                    .id
                )
            live.start()
            until_answered(server, batch_id, count * (run + 1) // (kills + 1))
            live.stop()
            beside += live.first_s
            gaps += live.gaps_s
            if run == kills:
                until_answered(server, batch_id, count + 1)
                check_answers(client(server), batch_id, count)
        finally:
            live.stop()
            server.process.kill()  # its children end with it
            server.process.wait()
        orders.append(order_of(server.log, list(adapters)))
    total = sum(switches(order) for order in orders)
    tell(alone, beside, gaps, orders)
    # Up to eight adapters have lines in flight while one gives way to the next.
    assert total <= ADAPTERS * 8 + (kills + 1) * 8
    assert sum(map(len, orders)) <= count + kills * 64


def check_answers(api: openai.OpenAI, batch_id: str, count: int) -> None:
    batch = api.batches.retrieve(batch_id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {
        "total": count,
        "completed": count - BAD,
        "failed": BAD,
    }
    seen: list[str] = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        records = [json.loads(text) for text in api.files.content(file_id).text.splitlines()]
        seen += [record["custom_id"] for record in records]
        is_good = file_id == batch.output_file_id
        assert all((record["response"]["status_code"] == 200) is is_good for record in records)
    assert sorted(seen, key=int) == [f"{number}" for number in range(count)]


def tell(
    alone: list[float], beside: list[float], gaps: list[float], orders: list[list[str]]
) -> None:
    """Figures, for people."""
    before, after, step = (statistics.median(times) * 1e3 for times in (alone, beside, gaps))
    print(f"first token of live requests, p50: {before:.1f} ms alone ({len(alone)} requests),")
    print(f"{after:.1f} ms beside the batch ({len(beside)} requests); a step is {step:.1f} ms;")
    print(f"({after:.1f} - {step:.1f}) / {before:.1f} = {(after - step) / before:.2f}")
    for order in orders:
        groups = [name for at, name in enumerate(order) if not at or order[at - 1] != name]
        print(f"{len(order)} lines, {len(groups)} changes of adapter: {' '.join(groups[:40])}")
