"""SGLang's native shape against the live server, sent and read as `sglang.bench_serving` does."""

import json
import math
from typing import Any

import httpx
import pytest

PROMPT = "Please cancel order #10442. Ines Novak"
TOKENS = 12


def payload(prompt: str | list[int], **more: Any) -> dict[str, Any]:
    """The benchmark's own body."""
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        **more,
    }


def read(http: httpx.Client, body: dict[str, Any]) -> tuple[str, int, int]:
    """As the benchmark reads lines: the last text, its tokens, and events with new ones."""
    text, tokens, events = "", 0, 0
    with http.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            chunk = line.strip().removeprefix("data: ")
            if not chunk or chunk == "[DONE]":
                continue
            data = json.loads(chunk)
            if data["text"]:
                assert data["text"].startswith(text)
                assert data["meta_info"]["completion_tokens"] >= tokens
                text, tokens = data["text"], data["meta_info"]["completion_tokens"]
                events += 1
    return text, tokens, events


@pytest.mark.parametrize("lora_path", [None, "json"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_run_of_the_benchmark(http: httpx.Client, lora_path: str | None, stream: bool) -> None:
    """What is generated is what a completion of the same prompt has."""
    (model, *_) = [one["id"] for one in http.get("/v1/models").json()["data"]]
    asked = {"model": lora_path or model, "prompt": PROMPT, "temperature": 0}
    completion = http.post(
        "/v1/completions", json={**asked, "max_tokens": TOKENS, "ignore_eos": True}
    ).json()
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    for prompt in (PROMPT, ids):
        text, tokens, events = read(http, payload(prompt, lora_path=lora_path, stream=stream))
        assert (text, tokens) == (completion["choices"][0]["text"], TOKENS)
        assert (events > 1) == stream
    http.post("/flush_cache")
    server = http.get("/get_server_info").json()
    assert server["internal_states"][0].get("avg_spec_accept_length") is None


def test_each_prompt_has_its_adapter(http: httpx.Client) -> None:
    """As SGLang's guide to LoRA asks: the answers are those of requests of their own."""
    sampling = [{"temperature": 0, "max_new_tokens": most} for most in (9, 5, 7)]
    paths = ["json", None, "pirate"]
    both = {"lora_path": paths, "sampling_params": sampling, "return_logprob": True, "rid": "r"}
    answer = http.post("/generate", json={"text": [PROMPT] * 3, **both})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [one["meta_info"]["id"] for one in found] == ["r_0", "r_1", "r_2"]
    for one, path, drawn in zip(found, paths, sampling, strict=True):
        body = {"text": PROMPT, "lora_path": path, "sampling_params": drawn}
        alone = http.post("/generate", json={**body, "return_logprob": True}).json()
        assert (one["text"], one["output_ids"]) == (alone["text"], alone["output_ids"])
        assert one["meta_info"]["output_token_logprobs"]
    wrong = {"text": [PROMPT] * 2, "lora_path": ["json", "no-such-adapter"]}
    answer = http.post("/generate", json=wrong)
    assert answer.status_code == 404
    assert "no-such-adapter" in answer.json()["error"]["message"]


def test_scores_are_those_of_completions(http: httpx.Client) -> None:
    asked = {"model": "json", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    scored = http.post("/v1/completions", json={**asked, "logprobs": 2, "echo": True}).json()
    expected = scored["choices"][0]["logprobs"]
    body = {
        "text": PROMPT,
        "lora_path": "json",
        "sampling_params": {"max_new_tokens": 5, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
        "token_ids_logprob": [5, 9, 7],
    }
    meta = http.post("/generate", json=body).json()["meta_info"]
    told = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    assert [one[2] for one in told] == expected["tokens"]
    assert told[0][0] is None
    values = [one[0] for one in told[1:]]
    assert values == pytest.approx(expected["token_logprobs"][1:], abs=1e-3)
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 5
    named = {"logprobs": 0, "echo": True, "return_tokens_as_token_ids": True}
    listed = {**asked, **named, "logprob_token_ids": [5, 9, 7]}
    choice = http.post("/v1/completions", json=listed).json()["choices"][0]
    found = [*meta["input_token_ids_logprobs"], *meta["output_token_ids_logprobs"]]
    places = [*zip(found, choice["logprobs"]["top_logprobs"], strict=True)]
    assert places[0] == (None, None)
    for own, others in places[1:]:
        assert [one[1] for one in own] == [5, 9, 7]
        told_there = [others[f"token_id:{token}"] for token in (5, 9, 7)]
        assert [one[0] for one in own] == pytest.approx(told_there, abs=1e-3)
    events = http.post("/generate", json={**body, "stream": True}).text.splitlines()
    last = json.loads([line for line in events if line.startswith("data: {")][-1][6:])["meta_info"]
    told_so_far = [*last["input_token_logprobs"], *last["output_token_logprobs"]]
    assert [one[1:] for one in told_so_far] == [one[1:] for one in told]
    alone = {**body, "sampling_params": {"max_new_tokens": 0}}
    answer = http.post("/generate", json=alone).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    read = [one[0] for one in answer["meta_info"]["input_token_logprobs"][1:]]
    assert read == pytest.approx(values[: len(read)], abs=1e-3)


@pytest.mark.parametrize(
    ("items", "labels", "path"),
    [(["Order", "Refund"], [5, 9, 7], ""), ("Late", [30], "sql"), (["x"] * 3, [4, 3], "pirate")],
)
def test_tokens_as_labels(http: httpx.Client, items: Any, labels: list[int], path: str) -> None:
    """What a completion reports of the same tokens, exponentiated or as a softmax."""
    body = {"query": PROMPT, "items": items, "label_token_ids": labels, "lora_path": path or None}
    scores = http.post("/v1/score", json=body).json()["scores"]
    for item, found in zip([items] if isinstance(items, str) else items, scores, strict=True):
        asked = {"prompt": PROMPT + item, "lora_path": path or None, "temperature": 0}
        more = {"max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
        listed = {**asked, **more, "logprob_token_ids": labels}
        [told] = http.post("/v1/completions", json=listed).json()["choices"][0]["logprobs"][
            "top_logprobs"
        ]
        wanted = [math.exp(told[f"token_id:{label}"]) for label in labels]
        assert found == pytest.approx(wanted, rel=1e-2)
    shares = http.post("/v1/score", json={**body, "apply_softmax": True}).json()["scores"]
    assert [sum(row) for row in shares] == pytest.approx([1.0] * len(scores))


def test_several_prompts_and_a_form(http: httpx.Client) -> None:
    sampling = {"n": 2, "regex": "[0-9]{3}", "sampling_seed": 7}
    body = {"text": [PROMPT, "Order"], "sampling_params": sampling}
    answers = http.post("/generate", json=body).json()
    assert len(answers) == 4
    assert all(len(one["text"]) == 3 and one["text"].isdigit() for one in answers)
    assert [one["meta_info"]["finish_reason"]["type"] for one in answers] == ["stop"] * 4
    last: dict[int, Any] = {}
    for line in http.post("/generate", json={**body, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            last[event["index"]] = event
    streamed = [last[index]["text"] for index in range(4)]
    assert streamed == [one["text"] for one in answers]


def test_descriptions(http: httpx.Client) -> None:
    info = http.get("/info").json()
    assert http.get("/model_info").json()["model_path"] == info["model_id"]
    assert http.get("/server_info").json()["context_length"] == info["max_total_tokens"]
    assert http.get("/health_generate").status_code == 200
