"""`/tokenize` in its three shapes, `/detokenize`, `/tokenizer_info`: as generations have it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.router.api.tokenize import MAX_TOKENIZED
from loraplex.server.protocol import AdapterLoad
from tests.router.fake_worker import (
    BASE_NAME,
    BOS,
    CHAT_TEMPLATE,
    MAX_CONTEXT,
    FakeWorker,
    ids_of,
    make_card,
    make_manifest,
    running_worker,
)
from tests.router.routes.test_keys import bearer, create, keyed
from tests.router.serving import Running, of_kept_router, running_router

OF_CHATS = ("chat_template_kwargs", "add_generation_prompt")
HI = [{"role": "user", "content": "hi"}]


async def tokenize(router: Running, **body: Any) -> httpx.Response:
    return await router.client.post("/tokenize", json=body)


async def ids(router: Running, **body: Any) -> list[int]:
    answer = await tokenize(router, **body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == MAX_CONTEXT
    tokens: list[int] = told["tokens"]
    return tokens


def fault(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["param"]


async def test_a_text_in_loraxs_shape(router: Running) -> None:
    answer = await tokenize(router, inputs="hé", other=None)
    assert [token["id"] for token in answer.json()] == [0x68, 0xC3, 0xA9]
    assert answer.json()[0] == {"id": 0x68, "text": "h", "start": 0, "stop": 1}


async def test_a_long_text_in_loraxs_shape(router: Running) -> None:
    spans = (await tokenize(router, inputs="ab" * 20_000)).json()
    assert [span["id"] for span in spans] == [97, 98] * 20_000
    assert [span["start"] for span in spans] == list(range(40_000))
    longer = await tokenize(router, inputs="a" * (MAX_TOKENIZED + 1))
    assert (longer.status_code, "524288" in longer.text) == (422, True)


async def test_a_text_in_vllms_shape(router: Running) -> None:
    assert await ids(router, model=BASE_NAME, prompt="hé") == [0x68, 0xC3, 0xA9]
    assert await ids(router, prompt="<bos>x") == [BOS, ord("x")]
    assert await ids(router, model=None, prompt="") == []
    named = await tokenize(router, model="pirate", prompt="é", return_token_strs=True)
    assert named.json()["token_strs"] == ["Ã", "©"]
    assert (await tokenize(router, prompt="x")).json()["token_strs"] is None


async def test_what_does_not_fit_the_context_is_counted(router: Running) -> None:
    assert await ids(router, prompt="ab" * MAX_CONTEXT) == [97, 98] * MAX_CONTEXT
    messages = [{"role": "user", "content": "a" * 4096}]
    assert len(await ids(router, messages=messages)) == 4096 + len("<user><assistant>")
    longer = await tokenize(router, prompt="a" * (MAX_TOKENIZED + 1))
    assert fault(longer) == (400, "prompt")


async def test_a_chat_in_vllms_shape(router: Running) -> None:
    assert bytes(await ids(router, model=BASE_NAME, messages=HI)) == b"<user>hi<assistant>"


@pytest.mark.parametrize("name", [BASE_NAME, "org/own"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"tone": "polite"}, "temperature": 0, "n": 2, "user": "me"},
    ],
)
async def test_counts_are_those_of_generations(
    bos_router: Running, name: str, fields: dict[str, Any]
) -> None:
    for path, says in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "hi"})):
        sent = fields
        if path == "completions":
            sent = {name: value for name, value in fields.items() if name not in OF_CHATS}
        body = {"model": name, **says, **sent}
        counted = await ids(bos_router, **body)
        answer = await bos_router.client.post(f"/v1/{path}", json=body)
        assert answer.json()["usage"]["prompt_tokens"] == len(counted), answer.text


@pytest.fixture
async def bos_router(tmp_path: Path) -> AsyncIterator[Running]:
    """Its tokenizer writes a BOS; `org/own` has a template of its own."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    card = make_card()
    tokenizer = Tokenizer.from_str(card.tokenizer_json)
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    worker = FakeWorker(make_card(tokenizer_json=tokenizer.to_str()))
    worker.loader = own_template
    async with running_worker(worker), running_router(tmp_path, worker) as router:
        yield router


async def own_template(load: AdapterLoad) -> Any:
    template = "{{ tone }}{{ messages[0].content | upper }}{% if tools %}{{ tools }}{% endif %}!"
    return make_manifest("org/own", chat_template=template)


async def test_an_adapters_own_template(bos_router: Running) -> None:
    assert bytes(await ids(bos_router, model="org/own", messages=HI)) == b"HI!"
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = bytes(await ids(bos_router, model="org/own", messages=HI, tools=tools))
    assert b"'name': 'f'" in told
    assert await ids(bos_router, model="org/own", prompt="x") == [BOS, ord("x")]


@of_kept_router
@of_kept_router
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, "model"),
        ({"model": "org/missing", "messages": HI}, 404, "model"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": [1, 2]}, 400, "prompt"),
        ({"messages": []}, 400, "messages"),
        ({"messages": HI, "tools": "x"}, 400, "tools"),
        ({"messages": HI, "surprise": 1}, 400, "surprise"),
        ({"prompt": "x", "return_token_strs": "yes"}, 400, "return_token_strs"),
        ({"prompt": "x", "model": 7}, 400, "model"),
    ],
)
async def test_faults_of_vllms_shapes(
    kept_router: Running, body: dict[str, Any], status: int, param: str
) -> None:
    assert fault(await tokenize(kept_router, **body)) == (status, param)


@of_kept_router
@of_kept_router
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "`prompt` or `messages`"),
        ({"inputs": None}, "`prompt` or `messages`"),
        ({"inputs": "x", "prompt": "x"}, "not both"),
        ({"prompt": "x", "messages": HI}, "not both"),
        ({"inputs": "x", "surprise": 1}, "surprise"),
        ({"inputs": ["x"]}, "inputs"),
    ],
)
async def test_faults_that_are_reported_as_loraxs(
    kept_router: Running, body: dict[str, Any], word: str
) -> None:
    answer = await tokenize(kept_router, **body)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert word in answer.json()["error"]


async def test_text_of_tokens(router: Running) -> None:
    async def text(*tokens: int, **more: Any) -> Any:
        body = {"tokens": tokens, **more}
        answer = await router.client.post("/detokenize", json=body)
        return answer.json()["prompt"] if answer.status_code == 200 else fault(answer)

    assert await text(BOS, *"hé".encode(), model=BASE_NAME) == "<bos>hé"
    assert await text(0xC3, model="pirate") == "�"
    assert await text() == ""
    assert await text(258) == (400, "tokens")
    assert await text(-1) == (400, "tokens[0]")
    assert await text(1, model="nobody") == (404, "model")
    assert await text(1, surprise=2) == (400, "surprise")
    assert await text(*[97] * 40_000) == "a" * 40_000


async def test_what_is_tokenised_comes_back(router: Running) -> None:
    for words in ("", "hé <eos>", "a\r\n\tb 😀", "x" * 100):
        tokens = await ids(router, prompt=words)
        answer = await router.client.post("/detokenize", json={"tokens": tokens})
        assert answer.json() == {"prompt": words}


async def test_what_the_tokenizer_has(router: Running) -> None:
    told = (await router.client.get("/tokenizer_info")).json()
    added = told.pop("added_tokens_decoder")
    assert added["257"]["content"] == "<bos>"
    assert added["257"]["special"] is True
    assert told == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT,
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": None,
        "unk_token": None,
        "additional_special_tokens": [],
        "clean_up_tokenization_spaces": False,
    }


async def test_a_key_opens_what_it_opens_for_generations(
    tmp_path: Path, worker: FakeWorker
) -> None:
    async with keyed(tmp_path, worker) as router:
        post = router.client.post
        key = bearer(await create(router, models=["pirate"]))
        for path, says in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [97]})):
            assert (await post(path, json=says)).status_code == 401
            for model, status in (("pirate", 200), (BASE_NAME, 403), ("org/x", 403), (None, 403)):
                body = {"model": model, **says}
                answer = await post(path, json=body, headers=key)
                assert answer.status_code == status, answer.text
        assert (await post("/tokenize", json={"inputs": "x"}, headers=key)).status_code == 200
        assert (await router.client.get("/tokenizer_info")).status_code == 401
        assert (await router.client.get("/tokenizer_info", headers=key)).status_code == 200


async def test_a_key_is_no_credential_for_a_source(tmp_path: Path, worker: FakeWorker) -> None:
    headers = bearer("hf_open")
    async with running_router(tmp_path, worker) as router:
        body = {"model": "org/private", "prompt": "x"}
        answer = await router.client.post("/tokenize", json=body, headers=headers)
        assert answer.status_code == 401
        assert router.hub.calls[-1][1] == "hf_open"
    async with keyed(tmp_path, worker) as router:
        key = await create(router)
        answer = await router.client.post("/tokenize", json=body, headers=bearer(key))
        assert answer.status_code == 401
        assert router.hub.calls[-1][1] is None


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/load", "GET /metrics"),
        ("/get_load/", "GET /metrics"),
        ("/v1/moderations", "no moderations"),
        ("/reset_prefix_cache", "keyed by content"),
    ],
)
async def test_other_servers_routes_say_what_serves(router: Running, path: str, word: str) -> None:
    answer = await router.client.post(path, json={})
    assert (answer.status_code, word in answer.text) == (404, True)


async def test_version_and_ping(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        version = await router.client.get("/version")
        info = await router.client.get("/info")
        assert version.json() == {"version": info.json()["version"]}
        for method in ("GET", "POST"):
            ping = await router.client.request(method, "/ping")
            assert (ping.status_code, ping.content) == (200, b"")
    async with running_router(tmp_path) as alone:
        assert (await alone.client.get("/ping")).status_code == 503


async def test_rendered_prompts(router: Running) -> None:
    """As vLLM has them: what a generation would run, and how."""
    body = {"model": BASE_NAME, "messages": HI, "temperature": 0.125, "stream": True}
    answer = await router.client.post("/v1/chat/completions/render", json=body)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["token_ids"] == await ids(router, messages=HI)
    assert (told["model"], told["stream"]) == (BASE_NAME, True)
    assert told["request_id"].startswith("chatcmpl-")
    sampling = told["sampling_params"]
    assert (sampling["temperature"], sampling["n"]) == (0.125, 1)
    assert sampling["max_tokens"] == MAX_CONTEXT - len(told["token_ids"])
    asked: dict[str, Any] = {
        "prompt": ["hi", "you"],
        "stop": "x",
        "request_id": "mine",
        "max_tokens": 4,
    }
    several = (await router.client.post("/v1/completions/render", json=asked)).json()
    expected = [await ids(router, prompt=text) for text in asked["prompt"]]
    assert [one["token_ids"] for one in several] == expected
    assert {one["request_id"] for one in several} == {"cmpl-mine"}
    assert several[0]["sampling_params"]["stop"] == ["x"]
    of_ids = {"prompt": ids_of("hi you")}
    (one,) = (await router.client.post("/v1/completions/render", json=of_ids)).json()
    assert (one["prompt"], one["token_ids"]) == ("hi you", ids_of("hi you"))


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "hi", "max_tokens": MAX_CONTEXT}, 400, "prompt"),
        ({"prompt": "hi", "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
        ({"prompt": "hi", "model": "hub:org/missing"}, 404, "model"),
    ],
)
async def test_what_would_not_run_is_not_rendered(
    router: Running, body: dict[str, Any], status: int, param: str
) -> None:
    refused = await router.client.post("/v1/completions/render", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
