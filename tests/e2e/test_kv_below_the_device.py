"""Pages in host memory and on disk over HTTP: prompts come back, also after kills and bad files."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Serving, start_serving
from tests.engines import engines_below
from tests.ports import free_port

pytestmark = pytest.mark.exhaustive
TIMEOUT_S = 240
METRICS = free_port(2)
WORDS = ("river", "stone", "lamp", "cloud", "seed", "glass", "winter", "road", "copper")
PROMPTS = 10
OPTIONS = (
    "--kv-memory",
    "4MiB",
    "--host-kv-memory",
    "8MiB",
    "--disk-kv",
    "64MiB",
    "--max-draft",
    "0",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose device holds few prompts, and whose host memory holds a few more."""
    folder = tmp_path_factory.mktemp("serving")
    ports = ("--metrics-port", str(METRICS))
    found = start_serving(
        *OPTIONS, *ports, "--cache-dir", str(folder / "cache"), log=folder / "log"
    )
    yield found
    found.process.terminate()
    assert found.process.wait(TIMEOUT_S) == 0


def prompt(kind: int) -> str:
    return " ".join(WORDS[(i * i + kind * (i + 3)) % len(WORDS)] for i in range(150))


def answers(serving: Serving, kinds: range) -> list[str]:
    found = []
    for kind in kinds:
        body = {"inputs": prompt(kind), "parameters": {"max_new_tokens": 4}}
        answer = httpx.post(f"{serving.url}/generate", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["generated_text"])
    return found


def counts(name: str) -> dict[str, float]:
    """The worker's samples of a metric, by label."""
    text = httpx.get(f"http://127.0.0.1:{METRICS + 1}/metrics", timeout=TIMEOUT_S).text
    line = re.compile(
        rf'^loraplex_worker_{name}(?:{{[^}}]*?(?:way|tier)="(\w+)"[^}}]*}})? (\S+)', re.M
    )
    return {label: float(number) for label, number in line.findall(text)}


def test_prompts_come_back_after_kills_and_bad_files(small: Serving) -> None:
    first = answers(small, range(PROMPTS))
    assert answers(small, range(PROMPTS)) == first
    copies = counts("kv_page_copies_total")
    assert copies["in"] > 0
    assert copies["read"] > 0
    (engine,) = engines_below(small.process.pid)
    engine.send_signal(signal.SIGKILL)
    assert answers(small, range(PROMPTS)) == first
    assert counts("kv_page_copies_total")["read"] > copies["read"]
    cache = Path(small.log).parent / "cache"
    for path in (cache / "kv").rglob("*.page"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert answers(small, range(PROMPTS)) == first
    assert counts("kv_page_faults_total")["read"] > 0
    page = httpx.get(f"{small.url}/v1/fleet", timeout=TIMEOUT_S).json()
    assert [place for place, _, _ in page["workers"][0]["kept_pages"]] == ["host", "disk"]
