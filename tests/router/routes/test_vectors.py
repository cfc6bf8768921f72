"""`/v1/embeddings` and `/embed`: shapes, adapters, keys, limits, failover, and what is refused."""

import base64
import json
import math
import struct
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import CreateEmbeddingResponse

from loraplex.server.protocol import ClassForm, ErrorCode, GenerateRequest, VectorForm, VectorParams
from tests.router.fake_worker import (
    BASE_NAME,
    BOS,
    EOS,
    FakeWorker,
    ids_of,
    make_card,
    make_manifest,
)
from tests.router.routes.test_keys import ADMIN, bearer, create, keyed
from tests.router.serving import Running, of_kept_router, running_router

PIRATE = make_manifest("org/pirate").digest
FORM = VectorForm(
    size=4,
    max_tokens=40,
    pooling="mean",
    normalises=False,
    prompts={"query": "Q: ", "document": ""},
    default_prompt="query",
)


async def embed(router: Running, **body: Any) -> httpx.Response:
    return await router.client.post("/v1/embeddings", json={"model": BASE_NAME} | body)


async def vectors(router: Running, **body: Any) -> list[list[float]]:
    answer = await embed(router, **body)
    assert answer.status_code == 200, answer.text
    parsed = CreateEmbeddingResponse.model_validate(answer.json(), strict=True)
    assert [one.index for one in parsed.data] == list(range(len(parsed.data)))
    return [one.embedding for one in parsed.data]


def unit(*numbers: float) -> Any:
    length = math.hypot(*numbers)
    return pytest.approx([number / length for number in numbers], abs=1e-6)


@pytest.fixture
async def formed(tmp_path: Path) -> AsyncIterator[tuple[Running, FakeWorker]]:
    """A router and a worker whose model has files about vectors."""
    worker = FakeWorker(make_card(vectors=FORM, writes=False))
    await worker.start()
    async with running_router(tmp_path, worker) as router:
        yield router, worker
    await worker.stop()


async def test_a_text_and_texts(router: Running, worker: FakeWorker) -> None:
    answer = await embed(router, input="hi", user="me")
    body = answer.json()
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert (body["object"], body["model"]) == ("list", BASE_NAME)
    assert body["data"][0]["embedding"] == unit(sum(b"hi"), 2, b"i"[0], 0)
    assert answer.headers["x-loraplex-start"] == "base"
    both = await vectors(router, input=["hi", "you"])
    assert both == [unit(sum(b"hi"), 2, b"i"[0], 0), unit(sum(b"you"), 3, b"u"[0], 0)]
    request = worker.requests[-1]
    assert (request.vector, request.sampling.max_tokens) == (VectorParams(), 0)
    assert await router.metric("loraplex_vectors_total") == 3
    assert await router.metric("loraplex_generated_tokens_total") == 0
    assert await router.metric("loraplex_prompt_tokens_total") == 7


async def test_token_ids(router: Running) -> None:
    ids = ids_of("hi")
    expected = [unit(sum(ids), 2, ids[-1], 0)]
    assert await vectors(router, input=ids) == expected
    assert await vectors(router, input=[ids]) == expected
    assert len(await vectors(router, input=[ids, ids_of("you")])) == 2


async def test_base64_and_dimensions(router: Running) -> None:
    answer = await embed(router, input="hi", encoding_format="base64", dimensions=2)
    packed = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert list(struct.unpack("<2f", packed)) == unit(sum(b"hi"), 2)
    assert (await vectors(router, input="hi", dimensions=3, normalize=False))[0] == [
        *(sum(b"hi"), 2, b"i"[0])
    ]


async def test_adapters_change_the_vector(router: Running, worker: FakeWorker) -> None:
    worker.load_s = 0.5
    answer = await embed(router, model="hub:org/pirate", input="hi", normalize=False)
    assert answer.json()["data"][0]["embedding"][3] == int(PIRATE[:2], 16)
    assert answer.headers["x-loraplex-adapter-digest"] == PIRATE
    assert answer.headers["x-loraplex-start"] == "cold"
    missing = await embed(router, model="hub:org/missing", input="hi")
    assert missing.status_code == 404


async def test_what_the_models_files_say(formed: tuple[Running, FakeWorker]) -> None:
    router, worker = formed

    async def read(**body: Any) -> bytes:
        await vectors(router, input="hi", **body)
        assert worker.requests[-1].vector == VectorParams(pooling="mean")
        return bytes(worker.requests[-1].prompt_ids)

    assert await read() == b"Q: hi"
    assert await read(prompt_name="document") == b"hi"
    assert await read(prompt="S:") == b"S:hi"
    assert await read(prompt="") == b"hi"
    plain = await vectors(router, input="hi", prompt_name="document")
    assert plain[0] == [*(sum(b"hi"), 2, b"i"[0]), 0]
    assert (await vectors(router, input="hi", prompt="", normalize=True))[0] == unit(*plain[0])
    # Token ids are what the caller made of a prompt.
    await vectors(router, input=ids_of("hi"))
    assert bytes(worker.requests[-1].prompt_ids) == b"hi"


async def test_texts_that_are_too_long(formed: tuple[Running, FakeWorker]) -> None:
    router, worker = formed
    long = "abcdefghij" * 5
    refused = await embed(router, input=["x", long])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert "at most 40 tokens; got 53" in error["message"]

    async def kept(**body: Any) -> str:
        await vectors(router, input=long, prompt="", **body)
        return bytes(worker.requests[-1].prompt_ids).decode()

    assert await kept(truncate_prompt_tokens=-1) == long[:40]
    assert await kept(truncate_prompt_tokens=3) == "abc"
    assert await kept(truncate_prompt_tokens=3, truncation_side="left") == "hij"


async def test_what_a_tokenizer_puts_around_a_text_outlives_a_cut(tmp_path: Path) -> None:
    card = make_card()
    tokenizer = json.loads(card.tokenizer_json)
    around = [
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<eos>", "type_id": 0}},
    ]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": around,
        "pair": around,
        "special_tokens": {
            name: {"id": name, "ids": [i], "tokens": [name]}
            for name, i in (("<bos>", BOS), ("<eos>", EOS))
        },
    }
    worker = FakeWorker(make_card(tokenizer_json=json.dumps(tokenizer)))
    await worker.start()
    async with running_router(tmp_path, worker) as router:
        for side, kept in (("right", "ab"), ("left", "yz")):
            await vectors(router, input="abcxyz", truncate_prompt_tokens=4, truncation_side=side)
            assert worker.requests[-1].prompt_ids == [BOS, *ids_of(kept), EOS]
        await vectors(router, input="abcxyz", truncate_prompt_tokens=8)
        assert worker.requests[-1].prompt_ids == [BOS, *ids_of("abcxyz"), EOS]
    await worker.stop()


@of_kept_router
@of_kept_router
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "at least one"),
        ({"input": [[]]}, "input", "no empty list"),
        ({"input": ""}, "input", "at least one token"),
        ({"input": ["a", ""]}, "input[1]", "at least one token"),
        ({"input": ["a", 3]}, "input", "token ids only"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": [300]}, "input", "token ids from 0 to 257"),
        ({"dimensions": 5}, "dimensions", "have 4, got 5"),
        ({"dimensions": 0}, "dimensions", ">= 1"),
        ({"encoding_format": "int8"}, "encoding_format", "int8"),
        ({"prompt_name": "query"}, "prompt_name", "it has: none"),
        ({"prompt_name": "a", "prompt": "b"}, "prompt", "not both"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"truncation_side": "left"}, "truncation_side", "needs"),
        ({"temperatur": 1}, "temperatur", "Unrecognized"),
        ({"texts": ["x"]}, "texts", "use `input`"),
        ({"metadata": 3}, "metadata", "an object"),
        ({"model": "hub:org/x", "adapter_source": "pbase"}, "adapter_source", "Predibase"),
    ],
)
async def test_refused_by_name(
    kept_router: Running, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await embed(kept_router, **({"input": "hi"} | fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_loraxs_and_teis_shapes(router: Running, worker: FakeWorker) -> None:
    async def post(**body: Any) -> Any:
        answer = await router.client.post("/embed", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    plain, expected = (sum(b"hi"), 2, b"i"[0], 0), unit(sum(b"hi"), 2, b"i"[0], 0)
    # As huggingface_hub sends it, then as lorax-client does.
    assert await post(inputs="hi") == [expected]
    assert (await post(inputs="hi", parameters=None, stream=False))["embeddings"] == expected
    assert (await post(inputs="hi", parameters=None))["embeddings"] == expected
    named = {"adapter_id": "org/pirate", "adapter_source": "hub"}
    assert (await post(inputs="hi", parameters=named))["embeddings"] != expected
    assert worker.requests[-1].adapter == PIRATE
    assert await post(inputs=["hi", "hi"]) == [expected, expected]
    assert await post(inputs="hi", truncate=True) == [expected]
    assert await post(inputs="hi", normalize=False) == [list(plain)]
    assert await post(inputs=["hi"], parameters=named, dimensions=2) == [unit(*plain[:2])]
    await post(inputs="x" * 600, truncate=True, truncation_direction="Left")
    assert len(worker.requests[-1].prompt_ids) == 512
    for body, words in (
        ({"inputs": "hi", "stream": True}, "never streamed"),
        ({"inputs": "hi", "normalise": True}, "normalize"),
        ({"inputs": "hi", "parameters": {"best_of": 2}}, "parameters.best_of"),
        ({"inputs": "x" * 600}, "at most 512 tokens"),
    ):
        answer = await router.client.post("/embed", json=body)
        assert answer.status_code == 422
        assert words in answer.json()["error"]


async def test_a_model_of_the_other_kind_is_named(tmp_path: Path) -> None:
    cards = (
        make_card(writes=False),
        make_card(writes=False, vectors=None, classes=ClassForm(("a", "b"), "softmax")),
    )
    for card, words in zip(
        cards, ("it gives vectors at /v1/embeddings", "it gives classes at /classify"), strict=True
    ):
        worker = FakeWorker(card)
        await worker.start()
        async with running_router(tmp_path, worker) as router:
            chat = {"messages": [{"role": "user", "content": "x"}]}
            for path, body in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", chat),
                ("/v1/messages", {**chat, "max_tokens": 3}),
                ("/v1/responses", {"input": "x"}),
            ):
                answer = await router.client.post(path, json={"model": BASE_NAME, **body})
                assert answer.status_code == 400, answer.text
                assert words in answer.json()["error"]["message"]
            answer = await router.client.post("/generate", json={"inputs": "x"})
            assert answer.status_code == 422
            assert words in answer.json()["error"]
            assert not worker.requests
            if card.vectors is None:
                answer = await embed(router, input="x")
                assert answer.status_code == 400
                assert (
                    "gives no vectors; it gives classes at /classify"
                    in answer.json()["error"]["message"]
                )
        await worker.stop()


async def test_another_worker_goes_on(tmp_path: Path) -> None:
    """One is lost with the vectors that it computes."""
    first, second = FakeWorker(worker_id="a"), FakeWorker(worker_id="b")
    lost: list[str] = []

    async def lose(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        if not lost:
            lost.append(worker.worker_id)
            worker.drop_connections()
        return None

    for worker in (first, second):
        worker.before_token = lose
        await worker.start()
    async with running_router(tmp_path, first, second) as router:
        both = await vectors(router, input=["hi", "you", "they"])
        assert both[0] == unit(sum(b"hi"), 2, b"i"[0], 0)
        assert len(lost) == 1
        assert await router.metric("loraplex_resumes_total") >= 1
    for worker in (first, second):
        await worker.stop()


async def test_errors_of_workers(router: Running, worker: FakeWorker) -> None:
    async def fail(of: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "internal"

    worker.before_token = fail
    assert (await embed(router, input="hi")).status_code == 500
    worker.before_token = FakeWorker().before_token
    worker.numbers = lambda _: []  # a worker of an older version
    answer = await embed(router, input="hi")
    assert answer.status_code == 503
    assert "gave no vector" in answer.json()["error"]["message"]
    await router.until_idle()


async def test_keys_and_quotas(tmp_path: Path, worker: FakeWorker) -> None:
    async with keyed(tmp_path, worker) as router:
        assert (await embed(router, input="hi")).status_code == 401
        key = await create(router, tenant="acme", limits={"tokens_per_minute": 5})
        body = {"model": BASE_NAME, "input": "hello"}
        post = partial(router.client.post, "/v1/embeddings", json=body, headers=bearer(key))
        answer = await post()
        assert answer.status_code == 200, answer.text
        usage = (await router.client.get("/v1/usage", headers=ADMIN)).json()["data"]
        assert [row["prompt_tokens"] for row in usage] == [5]
        assert [row["completion_tokens"] for row in usage] == [0]
        assert (await post()).status_code == 429


async def test_pooling_is_vllms_shape(router: Running) -> None:
    body = {"input": ["hi", "you"], "use_activation": False, "request_id": "mine"}
    answer = (await router.client.post("/pooling", json=body)).json()
    assert (answer["id"], answer["object"], answer["model"]) == ("pooling-mine", "list", BASE_NAME)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert answer["data"] == [
        {"index": 0, "object": "pooling", "data": [sum(b"hi"), 2, b"i"[0], 0]},
        {"index": 1, "object": "pooling", "data": [sum(b"you"), 3, b"u"[0], 0]},
    ]
    refused = await router.client.post("/pooling", json={"input": "hi", "task": "token_embed"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "task")


async def test_messages_are_rendered(formed: tuple[Running, FakeWorker]) -> None:
    """No prompt of the model's files comes before them."""
    router, worker = formed
    chat = [{"role": "user", "content": "hi"}]
    for route in ("/v1/embeddings", "/pooling"):
        body = {"model": BASE_NAME, "messages": chat, "add_generation_prompt": True}
        answer = await router.client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        told = await router.client.post("/tokenize", json={"messages": chat})
        assert worker.requests[-1].prompt_ids == told.json()["tokens"]
    long = [{"role": "user", "content": "x" * 60}]
    refused = await embed(router, messages=long)
    assert refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("kind", "read", "unbound"),
    [
        (None, b"Q: hi", None),
        ("search_query", b"Q: hi", None),
        ("search_document", b"hi", None),
        ("clustering", b"hi", "input_type"),
    ],
)
async def test_cohere_names_prompts(
    formed: tuple[Running, FakeWorker], kind: str | None, read: bytes, unbound: str | None
) -> None:
    router, worker = formed
    body = {"model": BASE_NAME, "texts": ["hi"], "input_type": kind}
    body["embedding_types"] = ["float", "ubinary"]
    answer = await router.client.post("/v2/embed", json=body)
    told = answer.json()
    assert bytes(worker.requests[-1].prompt_ids) == read
    assert answer.headers.get("x-loraplex-unbound") == unbound
    assert set(told["embeddings"]) == {"float", "ubinary"}
    assert told["texts"] == ["hi"]
    assert told["meta"]["billed_units"] == {"input_tokens": len(read)}
