"""`/classify`, `/score`, `/rerank` and their kin: shapes, prompts, numbers, and what is refused."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.adapters.classes import OwnClasses
from loraplex.adapters.manifest import AdapterManifest
from loraplex.server.protocol import (
    AdapterLoad,
    ClassForm,
    GenerateRequest,
    PairForm,
    VectorForm,
    VectorParams,
)
from tests.router.fake_worker import BASE_NAME, FakeWorker, make_card, make_manifest
from tests.router.serving import Running, running_router

PIRATE = make_manifest("org/pirate").digest
LABELS = ("good", "bad", "odd")
YES, NO = ord("y"), ord("n")
TEMPLATE = "<{instruction}|{query}|{document}>"
DOCUMENTS = ["a", "ccc", "bb"]


@asynccontextmanager
async def served(tmp_path: Path, **card: Any) -> AsyncIterator[tuple[Running, FakeWorker]]:
    worker = FakeWorker(make_card(**card))
    await worker.start()
    async with running_router(tmp_path, worker) as router:
        yield router, worker
    await worker.stop()


async def post(router: Running, path: str, status: int = 200, **body: Any) -> Any:
    answer: httpx.Response = await router.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def classifier(*labels: str, activation: Any = "softmax", pad: int | None = None) -> dict[str, Any]:
    return {"writes": False, "vectors": None, "classes": ClassForm(labels, activation, pad)}


RERANKER = {"pairs": PairForm("logits", (YES, NO), TEMPLATE, "find")}


def by_length(request: GenerateRequest) -> list[float]:
    """Logits: the more bytes, the better."""
    return [float(len(request.prompt_ids)), 10.0]


async def test_classes(tmp_path: Path) -> None:
    async with served(tmp_path, **classifier(*LABELS)) as (router, worker):
        worker.numbers = lambda request: [1.0, 3.0, float(len(request.prompt_ids))]
        body = await post(router, "/classify", model=BASE_NAME, input=["ab", "abcde"])
        assert (body["object"], body["model"]) == ("list", BASE_NAME)
        assert body["id"].startswith("classify-")
        assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        powers = [math.exp(score) for score in (1, 3, 2)]
        first, second = body["data"]
        assert first["probs"] == pytest.approx([power / sum(powers) for power in powers])
        assert (first["index"], first["label"], first["num_classes"]) == (0, "bad", 3)
        assert (second["index"], second["label"]) == (1, "odd")
        assert worker.requests[-1].vector == VectorParams("scores")
        for field in ("use_activation", "activation", "softmax"):
            raw = await post(router, "/classify", input="ab", **{field: False})
            assert raw["data"][0]["probs"] == [1, 3, 2]
        named = await post(router, "/classify", model="org/pirate", input=[1, 2])
        assert named["model"] == "org/pirate"
        assert worker.requests[-1].adapter == PIRATE
        # As lorax-client sends it.
        text: dict[str, Any] = {"parameters": None, "stream": False}
        ranked = await post(router, "/classify", inputs="ab", **text)
        assert [one["label"] for one in ranked] == ["bad", "odd", "good"]
        several = await post(router, "/classify_batch", inputs=["ab", "abcde"], **text)
        assert [one[0]["label"] for one in several] == ["bad", "odd"]
        assert await router.metric('loraplex_vectors_total{use="classes"}') == 9


async def test_heads_of_adapters(tmp_path: Path) -> None:
    """On a model for text: an adapter with a head gives classes alone, one without gives none."""
    classes = OwnClasses(2, ("calm", "angry"), None, ord("_"))

    async def load(order: AdapterLoad) -> AdapterManifest:
        return make_manifest(order.ref.name, classes=classes if "mood" in order.ref.name else None)

    async with served(tmp_path, vectors=VectorForm(2, 64)) as (router, worker):
        worker.loader = load
        worker.numbers = lambda _: [0.0, 1.0]
        body = await post(router, "/classify", model="org/mood", input="ab__")
        odds = 1 / (1 + math.exp(-1))
        assert body["data"][0]["probs"] == pytest.approx([1 - odds, odds])
        assert body["data"][0]["label"] == "angry"
        assert worker.requests[-1].vector == VectorParams("scores")
        assert bytes(worker.requests[-1].prompt_ids) == b"ab"
        for path, words in (("completions", "no text"), ("embeddings", "no vectors")):
            said = {"prompt": "x", "max_tokens": 1} if path == "completions" else {"input": "x"}
            refused = await post(router, f"/v1/{path}", 400, model="org/mood", **said)
            message = refused["error"]["message"]
            assert "with the adapter org/mood, which has a score head, gives " + words in message
        refused = await post(router, "/classify", 400, model="org/pirate", input="x")
        assert "which has no score head, gives no classes" in refused["error"]["message"]
        refused = await post(router, "/classify", 400, input="x")
        assert f"the model {BASE_NAME} gives no classes" in refused["error"]["message"]


async def test_labels_of_their_own(tmp_path: Path) -> None:
    card = classifier("a", "b", activation="sigmoid")
    async with served(tmp_path, **card) as (router, worker):
        worker.numbers = lambda _: [0.0, -1000.0]
        body = await post(router, "/classify", input="x")
        assert body["data"][0]["probs"] == pytest.approx([0.5, 0.0])


async def test_padding_at_the_end_is_left_out(tmp_path: Path) -> None:
    """transformers judges the last token that is no padding."""
    async with served(tmp_path, **classifier(*LABELS, pad=ord("_"))) as (router, worker):
        worker.numbers = lambda _: [1.0, 2.0, 3.0]
        for text, read in (("ab__", b"ab"), ("a_b", b"a_b"), ("__", b"_"), ("ab", b"ab")):
            await post(router, "/classify", input=text)
            assert bytes(worker.requests[-1].prompt_ids) == read


async def test_yes_or_no(tmp_path: Path) -> None:
    async with served(tmp_path, **RERANKER) as (router, worker):
        worker.numbers = by_length
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            asked: dict[str, Any] = {"model": BASE_NAME, "query": "q", "documents": DOCUMENTS}
            body = await post(router, path, **asked)
            assert [one["index"] for one in body["results"]] == [1, 2, 0]
            shown = [one.get("document", {}).get("text") for one in body["results"]]
            assert shown == [None] * 3 if path == "/v2/rerank" else ["ccc", "bb", "a"]
            # `<find|q|ccc>` has 12 bytes; the other logit is 10.
            best = body["results"][0]["relevance_score"]
            assert best == pytest.approx(1 / (1 + math.exp(10 - 12)))
            assert body["usage"]["total_tokens"] == body["meta"]["tokens"]["input_tokens"] == 33
            few = await post(router, path, **asked, top_n=1, return_documents=False)
            assert few["results"] == [{"index": 1, "relevance_score": best}]
        request = next(r for r in worker.requests if len(r.prompt_ids) == 12)
        assert bytes(request.prompt_ids) == b"<find|q|ccc>"
        assert request.vector == VectorParams("logits", token_ids=(YES, NO))
        objects = [{"text": document} for document in DOCUMENTS]
        body = await post(router, "/rerank", query="q", documents=objects, instruction="sort")
        assert bytes(worker.requests[-1].prompt_ids).startswith(b"<sort|q|")
        assert body["results"][0]["document"] == {"text": "ccc"}
        await post(router, "/rerank", query="q", documents=["abcdef"], max_tokens_per_doc=3)
        assert bytes(worker.requests[-1].prompt_ids) == b"<find|q|abc>"
        await post(router, "/rerank", query="q", documents=["abcdef"], max_tokens_per_doc=0)
        assert bytes(worker.requests[-1].prompt_ids) == b"<find|q|abcdef>"
        # What a caller writes is no place for something else.
        await post(router, "/rerank", query="{document}{query}", documents=["{instruction}"])
        assert bytes(worker.requests[-1].prompt_ids) == b"<find|{document}{query}|{instruction}>"


async def test_scores_as_vllm_has_them(tmp_path: Path) -> None:
    async with served(tmp_path, **RERANKER) as (router, worker):
        worker.numbers = by_length

        async def scores(path: str = "/score", **body: Any) -> list[float]:
            answer = await post(router, path, **body)
            assert [one["index"] for one in answer["data"]] == [*range(len(answer["data"]))]
            return [one["score"] for one in answer["data"]]

        raw: dict[str, Any] = {"use_activation": False}
        assert await scores(queries="q", documents=DOCUMENTS, **raw) == [0, 2, 1]
        assert await scores("/v1/score", text_1="q", text_2="a", **raw) == [0]
        assert await scores(data_1=["q", "qqq"], data_2=["a", "a"], **raw) == [0, 2]
        assert await scores(queries="q", documents="a") == [0.5]
        for body, words in (
            ({"queries": ["q", "r"], "documents": DOCUMENTS}, "expected one, or 3"),
            ({"documents": "a"}, "`queries`: is needed"),
            ({"queries": "q", "text_1": "q", "documents": "a"}, "not both"),
            ({"queries": "q", "documents": []}, "documents"),
        ):
            error = await post(router, "/score", 400, **body)
            assert words in error["error"]["message"]


async def test_teis_shape(tmp_path: Path) -> None:
    async with served(tmp_path, **RERANKER) as (router, worker):
        worker.numbers = by_length
        body = await post(router, "/rerank", query="q", texts=DOCUMENTS, raw_scores=True)
        assert body == [
            {"index": 1, "score": 2.0},
            {"index": 2, "score": 1.0},
            {"index": 0, "score": 0.0},
        ]
        shown = await post(router, "/rerank", query="q", texts=DOCUMENTS, return_text=True)
        assert shown[0]["text"] == "ccc"
        error = await post(router, "/rerank", 422, query="q", texts=DOCUMENTS, top=3)
        assert "top" in error["error"]


async def test_documents_that_are_too_long(tmp_path: Path) -> None:
    async with served(tmp_path, **RERANKER) as (router, worker):
        worker.numbers = by_length
        long = "x" * 600
        error = (await post(router, "/rerank", 400, query="q", documents=["a", long]))["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "documents[1]")
        await post(router, "/rerank", query="q", documents=[long], truncate_prompt_tokens=-1)
        assert len(worker.requests[-1].prompt_ids) == 512
        assert bytes(worker.requests[-1].prompt_ids[-2:]) == b"x>"


async def test_a_classifier_of_one_label(tmp_path: Path) -> None:
    """It reads the tokenizer's own pair."""
    card = classifier("fit", activation="sigmoid") | {"pairs": PairForm("scores")}
    async with served(tmp_path, **card) as (router, worker):
        worker.numbers = lambda request: [float(len(request.prompt_ids) - 2)]
        body = await post(router, "/rerank", query="q", documents=DOCUMENTS)
        assert [one["index"] for one in body["results"]] == [1, 2, 0]
        assert body["results"][2]["relevance_score"] == pytest.approx(0.5)
        assert {bytes(r.prompt_ids) for r in worker.requests} == {b"qa", b"qccc", b"qbb"}
        error = await post(router, "/rerank", 400, query="q", documents=["a"], instruction="x")
        assert "`instruction`" in error["error"]["message"]
        await post(router, "/rerank", query="q", documents=["x" * 600], truncate_prompt_tokens=9)
        assert bytes(worker.requests[-1].prompt_ids) == b"q" + b"x" * 8


async def test_angles_of_vectors(tmp_path: Path) -> None:
    """Of a model for vectors, whose files have prompts for either side."""
    form = VectorForm(2, 512, prompts={"query": "Q:", "document": "D:"})
    card = {"writes": False, "vectors": form, "pairs": PairForm("vectors")}
    async with served(tmp_path, **card) as (router, worker):
        worker.numbers = lambda r: [float(r.prompt_ids.count(ord("a"))), float(r.prompt_ids[0])]
        body = await post(router, "/score", queries="aa", documents=["a", "b"])
        angle = math.atan2(2, ord("Q"))
        expected = [math.cos(angle - math.atan2(n, ord("D"))) for n in (1, 0)]
        assert [one["score"] for one in body["data"]] == pytest.approx(expected)
        assert {bytes(r.prompt_ids) for r in worker.requests} == {b"Q:aa", b"D:a", b"D:b"}
        each = await post(router, "/score", queries=["aa", "b"], documents=["a", "b"])
        assert each["data"][0]["score"] == pytest.approx(expected[0])
        assert len(worker.requests) == 3 + 4
        ranked = await post(router, "/rerank", query="aa", documents=["b", "a"])
        assert [one["index"] for one in ranked["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/classify", {"input": "x"}, "gives no classes; it gives text at /v1/chat/completions"),
        ("/rerank", {"query": "q", "documents": ["a"]}, "--rerank-tokens"),
        ("/v2/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "texts": ["a"]}, "not both"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents"),
        ("/classify", {"input": "x", "inputs": "y"}, "not both"),
        ("/classify", {"input": "x", "tasks": 1}, "tasks"),
    ],
)
async def test_refused(tmp_path: Path, path: str, body: dict[str, Any], words: str) -> None:
    async with served(tmp_path) as (router, _):
        error = (await post(router, path, 400, **body))["error"]
        assert words in error["message"]


async def test_a_score_of_several_labels(tmp_path: Path) -> None:
    async with served(tmp_path, **classifier(*LABELS)) as (router, _):
        error = (await post(router, "/score", 400, queries="a", documents="b"))["error"]
        assert "needs a classifier of one label, not 3" in error["message"]
