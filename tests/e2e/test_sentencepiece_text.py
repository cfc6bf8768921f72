"""A served tiny Llama with Llama 2's own vocabulary: texts as transformers gives them, everywhere.

Its weights make each token of a script be followed by the next, so that the answers hold what is
hard: characters in bytes, special tokens within a text, spaces, line breaks.
"""

import json
import os.path
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.e2e.serving import Serving, start_serving
from tests.vocabularies import load

# `tests/router/text` has such texts in a short run.
pytestmark = pytest.mark.exhaustive

SCRIPT = (
    *("▁Who", "▁said", "▁this", "?", "▁The", "▁qu", "ick", ",", "日", "本", "<0xF0>", "<0x9F>"),
    *("<0x99>", "<0x82>", "<0x0A>", "▁cat", "<s>", "▁went", "▁▁▁", "e", "!", "<0xE2>", "<unk>"),
    *("▁over", "<0xC3>", "<0xBC>", "ber", "</s>", "▁after"),
)
PROMPT = "Who said"
TEMPLATE = "{{ messages[0]['content'] }}"
STOP_TOKENS = ("<s>", "</s>", "<unk>")


class Expected(NamedTuple):
    """What transformers answers. own: of each token, the text that it adds inside a text."""

    ids: list[int]
    text: str
    own: list[str]


class Reference:
    """transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        loaded: Any = LlamaForCausalLM
        self.model = loaded.from_pretrained(folder, dtype=torch.float32).eval()
        self._written: dict[tuple[Any, ...], list[int]] = {}

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        text = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def answer(self, prompt: list[int], most: int, skip_special: bool = True) -> Expected:
        """Without the token that ended it."""
        asked = (*prompt, most)
        if asked not in self._written:  # several tests have the same question
            out = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=most, do_sample=False, pad_token_id=0
            )
            self._written[asked] = out[0, len(prompt) :].tolist()
        ids = [i for i in self._written[asked] if i != self.tokenizer.eos_token_id]
        before = self.decode(prompt, skip_special)
        whole = self.decode(prompt + ids, skip_special)
        text = whole[len(os.path.commonprefix([before, whole])) :]
        anchor = self.tokenizer.convert_tokens_to_ids(["x"])
        own = [self.decode([*anchor, i, *anchor], skip_special=False)[1:-1] for i in ids]
        return Expected(ids, text, own)


def make_llama(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(load("llama-2"))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    script = tokenizer.convert_tokens_to_ids(list(SCRIPT))
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.normal_()
        for token, following in zip(script, script[1:], strict=False):
            model.lm_head.weight[following] += 0.5 * table[token]
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    make_llama(made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def llama(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    caches = ("--cache-dir", str(tmp_path_factory.mktemp("cache")))
    log = tmp_path_factory.mktemp("serve") / "log"
    server = start_serving(str(folder), "--dtype", "float32", *caches, log=log)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(timeout=240)


@pytest.fixture
def client(llama: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=llama.url, timeout=240) as http:
        yield http


def post(client: httpx.Client, route: str, body: dict[str, Any]) -> Any:
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, route: str, body: dict[str, Any]) -> list[Any]:
    lines = client.post(route, json={**body, "stream": True}).text.splitlines()
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return [json.loads(event) for event in data if event != "[DONE]"]


def completion(prompt: str | list[int], most: int = 32, **more: Any) -> dict[str, Any]:
    return {"model": "", "prompt": prompt, "max_tokens": most, "temperature": 0, **more}


def chat(most: int = 32, **more: Any) -> dict[str, Any]:
    """The template's text is the prompt; its BOS is the tokenizer's."""
    messages = [{"role": "user", "content": PROMPT}]
    fields = {"max_tokens": most, "temperature": 0, "add_special_tokens": True}
    return {"model": "", "messages": messages, **fields, **more}


def lorax(most: int = 32, **more: Any) -> dict[str, Any]:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": most, "details": True, **more}}


def texts(client: httpx.Client, most: int = 32, **more: Any) -> dict[str, tuple[str, str]]:
    """Text and finish reason of every route."""
    lorax_fields = {key: [value] if key == "stop" else value for key, value in more.items()}
    whole = post(client, "/v1/completions", completion(PROMPT, most, **more))["choices"][0]
    message = post(client, "/v1/chat/completions", chat(most, **more))["choices"][0]
    generated = post(client, "/generate", lorax(most, **lorax_fields))
    streamed = [
        e["choices"][0] for e in events(client, "/v1/completions", completion(PROMPT, most, **more))
    ]
    chunks = [e["choices"][0] for e in events(client, "/v1/chat/completions", chat(most, **more))]
    tokens = events(client, "/generate_stream", lorax(most, **lorax_fields))
    return {
        "completion": (whole["text"], whole["finish_reason"]),
        "chat": (message["message"]["content"], message["finish_reason"]),
        "generate": (generated["generated_text"], generated["details"]["finish_reason"]),
        "completion, streamed": (
            "".join(choice["text"] for choice in streamed),
            streamed[-1]["finish_reason"],
        ),
        "chat, streamed": (
            "".join(choice["delta"].get("content") or "" for choice in chunks),
            chunks[-1]["finish_reason"],
        ),
        "generate, streamed": (
            "".join(event["token"]["text"] for event in tokens),
            tokens[-1]["details"]["finish_reason"],
        ),
    }


def test_the_script_is_what_the_model_says(reference: Reference) -> None:
    """Else nothing here would be tried."""
    prompt = reference.tokenizer.encode(PROMPT)
    expected = reference.answer(prompt, 32)
    assert reference.tokenizer.convert_ids_to_tokens(prompt) == ["<s>", *SCRIPT[:2]]
    assert reference.tokenizer.convert_ids_to_tokens(expected.ids) == list(SCRIPT[2:-2])
    assert expected.text == " this? The quick,日本🙂\n cat went   e!� overüber"


@pytest.mark.parametrize("most", [11, 32, 1, 3, 9, 12, 13, 20])
def test_texts(client: httpx.Client, reference: Reference, most: int) -> None:
    """However the answer is cut: within a character, before a special token."""
    expected = reference.answer(reference.tokenizer.encode(PROMPT), most).text
    finish = "length" if most < 32 else "stop"
    for route, (text, reason) in texts(client, most).items():
        ended = "eos_token" if "generate" in route and finish == "stop" else finish
        assert (text, reason) == (expected, ended), route


# Of the first four, one ends plainly, one in bytes, one holds a special token, one is the end.
STOPS = {
    # the text without the stop string, and its end with it
    " The": (" this?", " The"),
    "🙂\n": (" this? The quick,日本", "🙂\n"),
    "<s> went": (" this? The quick,日本🙂\n cat", " went"),
    "über</s>": (" this? The quick,日本🙂\n cat went   e!� over", "über"),
    "日本": (" this? The quick,", "日本"),
    "<s>": (" this? The quick,日本🙂\n cat", ""),
    "cat<s>": (" this? The quick,日本🙂\n ", "cat"),
    "cat went": (" this? The quick,日本🙂\n ", "cat went"),
    "!": (" this? The quick,日本🙂\n cat went   e", "!"),
    "</s>": (" this? The quick,日本🙂\n cat went   e!� overüber", ""),
}


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings(client: httpx.Client, stop: str) -> None:
    """LoRAX's routes keep what is found of them; OpenAI's do not."""
    without, found = STOPS[stop]
    for route, (text, reason) in texts(client, stop=stop).items():
        if "generate" in route:
            assert (text, reason) == (without + found, "stop_sequence"), route
        else:
            assert (text, reason) == (without, "stop"), route


WRITTEN = "<s> went   e!�<unk> overüber"


@pytest.mark.parametrize(
    ("fields", "expected", "finish"),
    [
        ({}, WRITTEN, "stop"),
        ({"include_stop_str_in_output": True}, WRITTEN + "</s>", "stop"),
        ({"stop": "<s> went"}, "", "stop"),
        ({"stop": "<s> went", "include_stop_str_in_output": True}, "<s> went", "stop"),
        ({"stop": "<unk>"}, "<s> went   e!�", "stop"),
    ],
)
def test_written_special_tokens(
    client: httpx.Client, reference: Reference, fields: dict[str, Any], expected: str, finish: str
) -> None:
    prompt = reference.tokenizer.encode(PROMPT)
    before = " this? The quick,日本🙂\n cat"
    assert reference.answer(prompt, 32, skip_special=False).text == before + WRITTEN
    asked = {"skip_special_tokens": False, "return_token_ids": True, **fields}
    choice = post(client, "/v1/completions", completion(PROMPT, 32, **asked))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (before + expected, finish)
    message = post(client, "/v1/chat/completions", chat(32, **asked))["choices"][0]
    assert message["message"]["content"] == choice["text"]
    ids = choice["token_ids"]
    assert ids == [*reference.answer(prompt, 32).ids, 2][: len(ids)]
    chunks = events(client, "/v1/completions", completion(PROMPT, 32, **asked))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    streamed = [chunk["choices"][0].get("token_ids") or [] for chunk in chunks]
    assert sum(streamed, []) == ids


def test_a_prompt_that_ends_within_a_character(client: httpx.Client, reference: Reference) -> None:
    """The character is the answer's; so is a word that the prompt begins."""
    script = reference.tokenizer.convert_tokens_to_ids(list(SCRIPT))
    for count in range(2, len(SCRIPT) - 3):
        prompt = [1, *script[:count]]
        expected = reference.answer(prompt, 5).text
        choice = post(client, "/v1/completions", completion(prompt, 5))["choices"][0]
        assert choice["text"] == expected


def test_texts_of_logprobs(client: httpx.Client, reference: Reference) -> None:
    expected = reference.answer(reference.tokenizer.encode(PROMPT), 32)
    answer = post(client, "/v1/completions", completion(PROMPT, logprobs=1))["choices"][0]
    logprobs, text = answer["logprobs"], answer["text"]
    count = len(expected.ids)
    assert logprobs["tokens"][:count] == expected.own
    assert logprobs["tokens"][count:] == ["</s>"]
    borders = [*logprobs["text_offset"], len(text)]
    parts = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    assert "".join(parts) == text
    for part, own in zip(parts, logprobs["tokens"], strict=True):
        assert part in (own, "") or "�" in own or own in STOP_TOKENS
    streamed = events(client, "/v1/completions", completion(PROMPT, logprobs=1))
    lists = [event["choices"][0]["logprobs"] for event in streamed]
    for name in ("tokens", "text_offset"):
        assert sum((part[name] for part in lists if part), []) == logprobs[name]
    content = post(client, "/v1/chat/completions", chat(logprobs=True))["choices"][0]["logprobs"]
    assert [token["token"] for token in content["content"]] == [
        own for own in expected.own if own not in STOP_TOKENS
    ]


def test_tokens_of_lorax(client: httpx.Client, reference: Reference) -> None:
    expected = reference.answer(reference.tokenizer.encode(PROMPT), 32)
    tokens = post(client, "/generate", lorax())["details"]["tokens"]
    assert [token["id"] for token in tokens] == [*expected.ids, 2]
    assert "".join(token["text"] for token in tokens if not token["special"]) == expected.text
    spelled = [token["text"] for token in tokens if token["special"]]
    assert spelled == ["<s>", "<unk>", "</s>"]
    fallback = [token["text"] for token in tokens[8:13]]
    assert fallback == ["", "", "", "🙂", "\n"]


def test_an_echoed_prompt(client: httpx.Client, reference: Reference) -> None:
    for prompt in ("Who said 日本🙂?", " Who</s> said", reference.tokenizer.encode(PROMPT)):
        body = completion(prompt, 4, logprobs=0, echo=True)
        answer = post(client, "/v1/completions", body)["choices"][0]
        known = prompt if isinstance(prompt, str) else reference.decode(prompt)
        assert answer["text"].startswith(known)
        borders = [*answer["logprobs"]["text_offset"], len(answer["text"])]
        parts = [answer["text"][a:b] for a, b in zip(borders, borders[1:], strict=False)]
        count = len(parts) - 4
        assert "".join(parts[:count]) == known
        assert list(accumulate(map(len, parts), initial=0)) == borders


def test_spans_of_a_text(client: httpx.Client) -> None:
    text = "The 日本🙂 fox</s>\n"
    tokens = post(client, "/tokenize", {"inputs": text})
    assert (tokens[0]["text"], tokens[0]["start"], tokens[0]["stop"]) == ("<s>", 0, 0)
    for token in tokens[1:]:
        assert token["text"] == text[token["start"] : token["stop"]]
    assert {token["text"] for token in tokens[1:]} >= {"The", " ", "日", "🙂", "</s>", "\n"}
