"""Routes in vLLM's shapes against the live server, asked as clients of vLLM ask."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from loraplex.launcher.demo import model_path
from tests.e2e.serving import Serving

BASE = "loraplex/demo"
CHAT = [
    {"role": "user", "content": "Please cancel order #10442. Ines Novak"},
    {"role": "assistant", "content": "It is cancelled."},
    {"role": "user", "content": "Thank you! \U0001f600"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model_path())
    return loaded


@pytest.fixture
def client(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="unused", max_retries=0)


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("model", [BASE, "json", None])
@pytest.mark.parametrize("special", [False, True])
def test_texts_are_cut_as_transformers_cuts_them(
    http: httpx.Client, tokenizer: PreTrainedTokenizerBase, model: str | None, special: bool
) -> None:
    for text in ("vllm1 This is a test prompt.", "", "  two\n\nlines é \U0001f600", "</s>x"):
        told = ask(http, "/tokenize", model=model, prompt=text, add_special_tokens=special)
        expected = tokenizer.encode(text, add_special_tokens=special)
        assert told["tokens"] == expected
        assert told == {
            "count": len(expected),
            "max_model_len": 1024,
            "tokens": expected,
            "token_strs": None,
        }
        strings = ask(
            http,
            "/tokenize",
            model=model,
            prompt=text,
            add_special_tokens=special,
            return_token_strs=True,
        )["token_strs"]
        assert strings == tokenizer.convert_ids_to_tokens(expected)
        back = ask(http, "/detokenize", model=model, tokens=expected)
        assert back == {"prompt": tokenizer.decode(expected)}


def test_chats_are_rendered_as_transformers_renders_them(
    http: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    """With the tokens that the demo's template writes; `add_special_tokens` puts no second BOS."""
    for begins, continues, special in itertools.product((False, True), repeat=3):
        if begins and continues:
            continue
        chat = [*CHAT, {"role": "assistant", "content": "Sure,"}] if continues else CHAT
        expected = tokenizer.apply_chat_template(
            chat, add_generation_prompt=begins, continue_final_message=continues, tokenize=False
        )
        told = ask(
            http,
            "/tokenize",
            messages=chat,
            add_generation_prompt=begins,
            continue_final_message=continues,
            add_special_tokens=special,
        )
        assert told["tokens"] == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("model", [BASE, "json"])
def test_counts_are_those_of_usage(http: httpx.Client, model: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": "  two words"}),
    ):
        told = ask(http, "/tokenize", model=model, **body)
        answer = ask(http, path, model=model, max_tokens=1, **body)
        assert answer["usage"]["prompt_tokens"] == told["count"]


def test_text_of_the_demos_tokens(http: httpx.Client) -> None:
    assert ask(http, "/detokenize", model="json", tokens=[1, 475]) == {"prompt": "<s>Ahoy"}
    beyond = http.post("/detokenize", json={"model": "json", "tokens": [1, 2048]})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "tokens")


def test_the_tokenizers_own_settings(
    http: httpx.Client, tokenizer: PreTrainedTokenizerBase
) -> None:
    told = http.get("/tokenizer_info").json()
    assert told["chat_template"] == tokenizer.chat_template
    for name in ("bos_token", "eos_token", "pad_token"):
        assert told[name] == getattr(tokenizer, name)
    added = {int(i): token["content"] for i, token in told["added_tokens_decoder"].items()}
    assert added == {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    assert str(model_path()) not in str(told)


def test_models(client: openai.OpenAI, adapter_root: Path) -> None:
    base, *adapters = client.models.list()
    assert (base.id, base.model_extra) == (
        BASE,
        {"root": BASE, "parent": None, "max_model_len": 1024},
    )
    roots = {one.id: (one.model_extra or {})["root"] for one in adapters}
    assert roots["json"].startswith("local:/")
    assert roots["json"].endswith("/adapters/json")
    assert all((one.model_extra or {})["parent"] == BASE for one in adapters)


def test_adapters_are_loaded_as_scripts_for_vllm_load_them(
    client: openai.OpenAI, adapter_root: Path
) -> None:
    def load(name: str, path: Path, **more: Any) -> str:
        body = {"lora_name": name, "lora_path": str(path), **more}
        return client.post("load_lora_adapter", cast_to=str, body=body)

    def unload(name: str) -> str:
        return client.post("unload_lora_adapter", cast_to=str, body={"lora_name": name})

    source = model_path().parent / "adapters"
    folder = adapter_root / "of-vllm"
    shutil.copytree(source / "json", folder)
    assert "Success" in load("zz", folder)
    with pytest.raises(openai.BadRequestError, match="already been loaded"):
        load("zz", folder)
    with pytest.raises(openai.BadRequestError, match="already been loaded"):
        load("zz", adapter_root / "other")
    assert "Success" in load("zz", folder, load_inplace=True)
    assert (client.models.retrieve("zz").model_extra or {})["root"] == f"local:{folder}"
    with pytest.raises(openai.NotFoundError):
        load("yy", adapter_root / "nowhere")
    (folder / "adapter_config.json").write_text("this is not json")
    with pytest.raises(openai.BadRequestError, match="adapter_config.json"):
        load("broken", folder)
    assert "Success" in unload("zz")
    with pytest.raises(openai.NotFoundError):
        unload("zz")
    with pytest.raises(openai.NotFoundError):
        unload("never")
