"""Published clients, unmodified, against the live server."""

import json
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, TextGenerationError
from openai.types.chat import ChatCompletionMessageParam

from loraplex.launcher.demo import EXAMPLES
from tests.e2e.serving import ROOT, Serving

CLIENTS_PYTHON = ROOT / ".venv-clients/bin/python"
MESSAGE = EXAMPLES[0]


@pytest.fixture
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="unused", max_retries=0)


def test_openai_chat(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": MESSAGE}]
    whole = client.chat.completions.create(
        model="json",
        messages=messages,
        temperature=0,
        max_completion_tokens=100,
        logprobs=True,
        top_logprobs=2,
    )
    choice = whole.choices[0]
    assert choice.finish_reason == "stop"
    json.loads(choice.message.content or "")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    chunks = list(
        client.chat.completions.create(
            model="json",
            messages=messages,
            temperature=0,
            max_tokens=100,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {c.id for c in chunks} == {chunks[0].id}


def test_openai_completions(client: openai.OpenAI) -> None:
    both = client.completions.create(
        model="sentiment", prompt=[MESSAGE, EXAMPLES[1]], temperature=0, max_tokens=30, logprobs=1
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].logprobs is not None
    assert both.choices[0].logprobs.tokens
    parts = client.completions.create(
        model="sentiment", prompt=MESSAGE, temperature=0, max_tokens=30, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == both.choices[0].text


def test_openai_n_and_seed(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": MESSAGE}],
            n=3,
            seed=seed,
            temperature=1.5,
            max_tokens=20,
        )
        return [choice.message.content or "" for choice in answer.choices]

    first = texts(7)
    assert len(set(first)) == 3
    assert texts(7) == first
    assert texts(8) != first


def test_openai_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {"json", "sql", "sentiment", "pirate"} <= set(names)
    assert client.models.retrieve("json").id == "json"


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-adapter", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="json", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="json", prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="json",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}] * 2,
        )


def test_hub_text_generation(serving: Serving) -> None:
    hub = InferenceClient(serving.url)
    plain = hub.text_generation(MESSAGE, adapter_id="json", max_new_tokens=100)
    assert isinstance(plain, str)
    json.loads(plain)
    detailed = hub.text_generation(
        MESSAGE, adapter_id="json", max_new_tokens=100, details=True, decoder_input_details=True
    )
    assert detailed.generated_text == plain
    assert detailed.details is not None
    assert detailed.details.finish_reason == "eos_token"
    assert detailed.details.generated_tokens == len(detailed.details.tokens)
    assert len(detailed.details.prefill) > 1
    parts = list(hub.text_generation(MESSAGE, adapter_id="json", max_new_tokens=100, stream=True))
    assert "".join(parts).strip() == plain.strip()


def test_hub_sends_whatever_it_has(serving: Serving) -> None:
    hub = InferenceClient(serving.url)
    asked: dict[str, Any] = {
        "adapter_id": "json",
        "do_sample": True,
        "frequency_penalty": 0.1,
        "max_new_tokens": 8,
        "repetition_penalty": 1.1,
        "return_full_text": True,
        "seed": 3,
        "stop": ["zzz"],
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "truncate": 12,
        "typical_p": 0.9,
        "watermark": False,
    }
    whole = hub.text_generation(MESSAGE, details=True, decoder_input_details=True, **asked)
    assert whole.details is not None
    assert whole.details.seed == 3
    parts = [*hub.text_generation(MESSAGE, stream=True, **asked)]
    assert whole.generated_text == MESSAGE + "".join(parts)


def test_hub_chat_completion(serving: Serving) -> None:
    hub = InferenceClient(base_url=serving.url)
    messages = [{"role": "user", "content": MESSAGE}]
    whole = hub.chat_completion(messages, model="pirate", max_tokens=100, temperature=0.0)
    parts = hub.chat_completion(
        messages, model="pirate", max_tokens=100, temperature=0.0, stream=True
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content


def test_hub_errors(serving: Serving) -> None:
    with pytest.raises(TextGenerationError, match="no-such-adapter") as caught:
        InferenceClient(serving.url).text_generation("x", adapter_id="no-such-adapter")
    cause = caught.value.__cause__
    assert isinstance(cause, HfHubHTTPError)
    assert cause.response.status_code == 404


@pytest.mark.clients
@pytest.mark.skipif(
    not CLIENTS_PYTHON.exists(), reason="`make test` makes the environment for these clients"
)
@pytest.mark.parametrize("name", ["lorax_client_script.py", "tgi_client_script.py"])
def test_clients_of_other_servers(serving: Serving, name: str) -> None:
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [str(CLIENTS_PYTHON), str(script), serving.url, MESSAGE],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all checks passed"
