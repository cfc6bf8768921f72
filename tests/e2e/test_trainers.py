"""Calls of reinforcement-learning trainers to the real server."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import EXAMPLES
from tests.e2e.test_lifecycle import put

PROMPT = EXAMPLES[0]
LONG = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 3}


def post(http: httpx.Client, path: str, body: Any = None, **more: Any) -> Any:
    answer = http.post(path, json=body, **more)
    assert answer.status_code == 200, answer.text
    return answer


def load(http: httpx.Client, name: str, folder: Path, *, inplace: bool) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": inplace}
    return http.post("/v1/load_lora_adapter", json=body)


def test_a_name_gets_new_content_while_its_old_one_generates(
    http: httpx.Client, adapter_root: Path
) -> None:
    """ART's and TRL's way: the same folder anew; then the name goes, and its requests finish."""
    folder = put(adapter_root / "policy", "json")
    assert load(http, "policy", folder, inplace=False).status_code == 200
    body = LONG | {"model": "policy", "stream": True, "return_token_ids": True}
    whole = post(http, "/v1/completions", body | {"stream": False}).json()["choices"][0]
    with http.stream("POST", "/v1/completions", json=body) as stream:
        old, lines = stream.headers["x-loraplex-adapter-digest"], stream.iter_lines()
        seen = [next(lines)]
        put(folder, "sql")
        again = load(http, "policy", folder, inplace=False)
        assert (again.status_code, again.json()["error"]["code"]) == (400, "conflict")
        assert load(http, "policy", folder, inplace=True).status_code == 200
        fresh = post(http, "/v1/completions", LONG | {"model": "policy", "max_tokens": 4})
        assert fresh.headers["x-loraplex-adapter-digest"] != old
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"}).status_code == 200
        assert http.post("/v1/completions", json=LONG | {"model": "policy"}).status_code == 410
        seen += list(lines)
    events = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
    ids = [token for event in events for token in event["choices"][0]["token_ids"] or ()]
    assert ids == whole["token_ids"]


def test_every_bit_of_a_seed_counts(http: httpx.Client) -> None:
    def drawn(seed: int) -> tuple[int, ...]:
        sampling = {"seed": seed, "max_tokens": 24, "temperature": 1.5, "ignore_eos": True}
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        return tuple(post(http, "/inference/v1/generate", body).json()["choices"][0]["token_ids"])

    seeds = [9, 9 + 2**32, 9 + 2**53, 9 + 2**62, 2**63 - 1]
    assert len({drawn(seed) for seed in seeds}) == len(seeds)
    assert drawn(seeds[3]) == drawn(seeds[3])


@pytest.mark.parametrize("drafts", [False, True])
def test_processed_logprobs_are_of_the_tokens_that_could_be_drawn(
    http: httpx.Client, drafts: bool
) -> None:
    body = {
        "model": "json",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 1.3,
        "top_k": 4,
        "repetition_penalty": 1.1,
        "seed": 2**62 + 5,
        "logprobs": 7,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "drafts": drafts,
    }
    choices = [
        post(http, "/v1/completions", body | {"logprobs_mode": mode}).json()["choices"][0]
        for mode in ("processed_logprobs", "raw")
    ]
    assert choices[0]["token_ids"] == choices[1]["token_ids"]
    processed, raw = (choice["logprobs"] for choice in choices)
    assert processed["token_logprobs"] != raw["token_logprobs"]
    for own, top in zip(processed["token_logprobs"], processed["top_logprobs"], strict=True):
        likely = [value for value in top.values() if value > -9999]
        assert len(likely) == 4
        assert math.fsum(map(math.exp, likely)) == pytest.approx(1, abs=1e-5)
        assert own in likely
        assert min(top.values()) == -9999.0
    for own, top in zip(raw["token_logprobs"], raw["top_logprobs"], strict=True):
        assert math.fsum(map(math.exp, top.values())) < 1 + 1e-5
        assert own > -9999


def test_a_pause_holds_what_comes_and_ends_what_runs(http: httpx.Client) -> None:
    answers: dict[str, Any] = {}

    def ask(name: str) -> threading.Thread:
        def work() -> None:
            answers[name] = post(http, "/v1/completions", LONG).json()["choices"][0]

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    expected = post(http, "/v1/completions", LONG).json()["choices"][0]
    try:
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            seen = [next(lines)]
            assert post(http, "/pause?mode=keep").json() == {"status": "paused"}
            held = ask("held")
            seen += list(lines)
        events = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
        texts = [event["choices"][0]["text"] for event in events]
        assert "".join(texts) == expected["text"], "a running one goes on, and is the same"
        assert not answers
        post(http, "/resume")
        held.join()
        assert answers["held"]["text"] == expected["text"]
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            seen = [next(lines)]
            assert post(http, "/pause").json() == {"status": "paused"}
            seen += list(lines)
        ended = [json.loads(line[6:]) for line in seen if line.startswith("data: {")]
        assert ended[-1]["choices"][0]["finish_reason"] == "abort"
    finally:
        post(http, "/resume")


def test_what_the_server_says_of_itself(http: httpx.Client) -> None:
    config = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["model_config"]["dtype"].startswith("torch.")
    assert config["lora_config"]["max_loras"] > 3
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert http.get("/get_world_size").json() == {"world_size": 1}
