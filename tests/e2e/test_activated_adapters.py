"""Activated adapters by HTTP: tokens and log-probabilities of PEFT's `generate`, pages shared with
the base."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from loraplex.launcher.bench.engine.offline import tokenizer_json
from tests.e2e.serving import Serving, start_serving
from tests.grids import beyond
from tests.server.model.families.parity import TOLERANCE, prompt
from tests.server.model.hub_models import VOCAB, make_model, save_model

# Slices, pages and judgement of activated adapters have short tests in their rooms.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.exhaustive]
TIMEOUT_S = 240
PAGE = 16
NEW_TOKENS = 9
INVOCATIONS = {"first": [7, 8], "second": [9], "third": [8, 8, 7]}
BIASED = "second"  # in B, from the invocation on
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Beside(NamedTuple):
    """A server, and PEFT's model with the same adapters."""

    serving: Serving
    oracle: PeftModel


def oracle_of(family: str) -> PeftModel:
    plain = LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(make_model(family), plain, adapter_name="plain")
    for name, ids in INVOCATIONS.items():
        config = LoraConfig(
            r=4, target_modules=TARGETS, task_type="CAUSAL_LM", alora_invocation_tokens=ids
        )
        config.lora_bias = name == BIASED
        model.add_adapter(name, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model.eval()


@pytest.fixture(scope="module", params=beyond(1, ["llama3", "qwen2", "gemma3"]))
def beside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("activated")
    base = save_model(make_model(request.param), folder / "base")
    (base / "tokenizer.json").write_text(tokenizer_json(VOCAB, (0, 1, 2)))
    oracle = oracle_of(request.param)
    oracle.save_pretrained(folder / "adapters")
    adapters = [f"{name}=local:{folder / 'adapters' / name}" for name in oracle.peft_config]
    serving = start_serving(
        *(str(base), "--device", "cpu", "--dtype", "float32"),
        *("--max-step-tokens", "40", "--adapter-root", str(folder), "--allow-other-base"),
        *(part for adapter in adapters for part in ("--adapter", adapter)),
        *("--model-name", "base", "--cache-dir", str(folder / "cache")),
        log=folder / "log",
    )
    yield Beside(serving, oracle)
    serving.process.terminate()
    assert serving.process.wait(timeout=TIMEOUT_S) == 0


def complete(serving: Serving, ids: list[int], model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0}
    body |= {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{serving.url}/v1/completions", json=body | fields, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generated(oracle: PeftModel, ids: list[int], name: str) -> tuple[list[int], list[float]]:
    """PEFT's greedy tokens and their log-probabilities."""
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    options |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    options["do_sample"] = False
    inputs = {"input_ids": torch.tensor([ids])}
    with torch.no_grad():
        if name == "base":
            with oracle.disable_adapter():
                found = oracle.generate(**inputs, **options)
        else:
            oracle.set_adapter(name)
            found = oracle.generate(**inputs, **options)
    tokens = found.sequences[0, len(ids) :].tolist()
    scores = [logits[0].log_softmax(-1) for logits in found.logits]
    return tokens, [row[token].item() for row, token in zip(scores, tokens, strict=True)]


def prompts() -> list[tuple[str, list[int]]]:
    """With an invocation at the beginning, amid, at the end, twice, and not at all."""
    found = []
    for seed, name in enumerate(("base", "plain", *INVOCATIONS)):
        body = [10 + i % (VOCAB - 10) for i in prompt(53, seed)]
        ids = INVOCATIONS.get(name, [7, 8])
        for at in ([0], [13], [len(body)], [5, 32], []):
            text = list(body)
            for place in reversed(at):
                text[place:place] = ids
            found.append((name, text))
    return found


def test_tokens_are_those_of_peft(beside: Beside) -> None:
    asked = prompts()
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda of: complete(beside.serving, of[1], of[0]), asked))
    for (name, ids), answer in zip(asked, answers, strict=True):
        [choice] = answer["choices"]
        tokens, logprobs = generated(beside.oracle, ids, name)
        assert choice["token_ids"] == tokens, (name, ids)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["plain", *INVOCATIONS])
def test_last_states_are_those_of_peft(beside: Beside, name: str) -> None:
    """Read behind an answer of a prompt whose invocation is amid."""
    ids = [10 + i % (VOCAB - 10) for i in prompt(53, 5)]
    ids[13:13] = INVOCATIONS.get(name, [7, 8])
    [choice] = complete(beside.serving, ids, name, return_hidden_states=True)["choices"]
    tokens, _ = generated(beside.oracle, ids, name)
    assert choice["token_ids"] == tokens
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    options |= {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
    found = beside.oracle.generate(input_ids=torch.tensor([ids]), **options).hidden_states
    assert choice["hidden_states"] == pytest.approx(
        found[-1][-1][0, -1].tolist(), abs=10 * TOLERANCE
    )


def test_a_conversation_is_computed_once(beside: Beside) -> None:
    conversation = [10 + i % (VOCAB - 10) for i in prompt(70, 99)]
    full = len(conversation) // PAGE * PAGE
    complete(beside.serving, conversation, "base")
    for name, ids in INVOCATIONS.items():
        answer = complete(beside.serving, [*conversation, *ids], name)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == full, name
        [choice] = answer["choices"]
        assert choice["token_ids"] == generated(beside.oracle, [*conversation, *ids], name)[0]
    other = complete(beside.serving, [*conversation, 7, 8], "plain")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
