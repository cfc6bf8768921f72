"""A base whose layers keep states, over HTTP: adapters, prefixes and a stream whose engine dies."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.load import DIGEST_HEADER
from tests.chaos.state_base import ADAPTERS, ROWS, StateBase
from tests.e2e.serving import Serving, start_serving
from tests.e2e.under_load import TIMEOUT_S
from tests.engines import engines_below

# `tests/chaos` has it, too, and starts as many processes.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


@pytest.fixture(scope="module", params=ROWS)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StateBase:
    return StateBase(tmp_path_factory.mktemp("base"), request.param)


@pytest.fixture(scope="module")
def serving(base: StateBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder, served = tmp_path_factory.mktemp("serving"), base.served
    named = [
        part for name in ADAPTERS for part in ("--adapter", f"{name}=local:{served.roots / name}")
    ]
    found = start_serving(
        *(str(served.model), *served.options, "--kv-memory", "16MiB", "--model-name", "base"),
        *("--adapter-root", str(served.roots), *named, "--cache-dir", str(folder / "cache")),
        log=folder / "log",
    )
    yield found
    found.process.terminate()
    assert found.process.wait(TIMEOUT_S) == 0


def asked(adapter: str | None, prompt: str, tokens: list[int]) -> dict[str, Any]:
    return {
        "model": adapter or "base",
        "prompt": prompt,
        "max_tokens": len(tokens),
        "temperature": 0,
        "return_token_ids": True,
    }


def test_adapters_and_prefixes(base: StateBase, http: httpx.Client) -> None:
    """Prompts begin alike: later ones go on from a state that was kept, of their own adapter."""
    reused: dict[str | None, int] = dict.fromkeys((None, *ADAPTERS), 0)
    digests = set()
    for adapter, prompt, tokens in base.answers:
        answer = http.post("/v1/completions", json=asked(adapter, prompt, tokens))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["choices"][0]["token_ids"] == tokens
        reused[adapter] += found["usage"]["prompt_tokens_details"]["cached_tokens"]
        digests.add(answer.headers.get(DIGEST_HEADER))
    assert len(digests) == len(reused)
    # Prefixes are of pages, which a base without layers that attend has not.
    has_pages = base.row != "mamba2"
    assert all((count > 0) == has_pages for count in reused.values())


@pytest.mark.parametrize("adapter", [None, "rank16"])
def test_a_stream_goes_on_when_its_engine_dies(
    base: StateBase, serving: Serving, http: httpx.Client, adapter: str | None
) -> None:
    _, prompt, tokens = max(
        (each for each in base.answers if each[0] == adapter), key=lambda each: len(each[2])
    )
    assert len(tokens) > 40
    found = list[int]()
    victim = next(iter(engines_below(serving.process.pid)))
    body = asked(adapter, prompt, tokens) | {"stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            found += json.loads(line[6:])["choices"][0].get("token_ids") or []
            if len(found) > 5 and victim.is_running():
                victim.send_signal(signal.SIGKILL)
                victim.wait(TIMEOUT_S)
    assert found == tokens
