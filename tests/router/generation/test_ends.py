"""Which tokens end an answer: for the worker, for the caller, for operators."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from loraplex.adapters.chat.conversation import PROBES
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.generation.ends import AnswerEnds
from loraplex.router.text.model import TextModel
from loraplex.router.text.template_sandbox import TemplateSandbox
from loraplex.server.protocol import AdapterLoad, GenerateRequest, ModelCard
from tests.router.fake_worker import (
    BASE_NAME,
    EOS,
    FakeWorker,
    ids_of,
    make_card,
    make_manifest,
    make_tokenizer,
    running_worker,
)
from tests.router.serving import Running, running_router

END, OWN, PLAIN = 258, 259, 260
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OWN_TEMPLATE = CHATML.replace("<|end|>", "<|own|>")


def card(**changes: Any) -> ModelCard:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["<|end|>", "<|own|>"])
    tokenizer.add_tokens([AddedToken("</plain>", special=False)])
    found = {"tokenizer_json": tokenizer.to_str(), "chat_template": CHATML, "vocab_size": 261}
    return make_card(eos_token_ids=(EOS, END), **found, **changes)


def manifest(name: str, **changes: Any) -> AdapterManifest:
    return make_manifest(name, **changes)


@pytest.mark.parametrize(
    ("adapter", "ends"),
    [
        (None, [EOS, END]),
        ({}, [EOS, END]),
        ({"end_token_ids": (OWN,)}, [EOS, END, OWN]),
        ({"chat_template": OWN_TEMPLATE}, [EOS, END, OWN]),
        ({"chat_template": CHATML.replace("<|end|>", "</plain>\n")}, [EOS, END, PLAIN]),
        ({"chat_template": "{{ raise_exception('no') }}"}, [EOS, END]),
        ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, [EOS, END]),
        ({"chat_template": OWN_TEMPLATE, "end_token_ids": (PLAIN,)}, [EOS, END, OWN, PLAIN]),
        (
            {
                "chat_template": CHATML.replace("<|end|>", "{{ eos_token }}"),
                "special_tokens": {"eos_token": "<|own|>"},
            },
            [EOS, END, OWN],
        ),
    ],
)
async def test_ends_of_base_and_adapter(adapter: dict[str, Any] | None, ends: list[int]) -> None:
    sandbox, model = TemplateSandbox(1), TextModel(card())
    try:
        found = AnswerEnds(sandbox)
        named = None if adapter is None else manifest("any", **adapter)
        assert list(await found.of(model, named)) == ends
        if named is not None:
            assert list(await found.own(model, named)) == ends[2:]
    finally:
        await sandbox.close()


async def test_a_template_is_looked_at_once() -> None:
    rendered: list[Any] = []

    class Counting(TemplateSandbox):
        async def render(self, *job: Any, **more: Any) -> str:
            rendered.append(job)
            return await super().render(*job, **more)

    sandbox, model = Counting(1), TextModel(card())
    try:
        ends = AnswerEnds(sandbox)
        for name in ("one", "two"):
            await ends.of(model, manifest(name, chat_template=OWN_TEMPLATE))
        asked = len(rendered)
        await ends.of(model, manifest("one", chat_template=OWN_TEMPLATE))
        assert len(rendered) == asked == len(PROBES)
    finally:
        await sandbox.close()


async def test_adapters_of_other_ends_side_by_side(tmp_path: Path) -> None:
    """The worker gets each request's ends, and ends by them as by the model's own."""

    async def load(load: AdapterLoad) -> AdapterManifest:
        own = {"end_token_ids": (OWN,)} if load.ref.name == "org/own" else {}
        return manifest(load.ref.name, **own)

    def script(request: GenerateRequest) -> list[int]:
        assert request.sampling.end_token_ids
        return [*ids_of("pong"), max(request.sampling.end_token_ids)]

    async with (
        running_worker(FakeWorker(card())) as worker,
        running_router(tmp_path, worker) as router,
    ):
        worker.loader, worker.script = load, script
        for model, end in ((BASE_NAME, END), ("hub:org/plain", END), ("hub:org/own", OWN)):
            body: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": "ping"}],
            }
            answer = (await router.client.post("/v1/chat/completions", json=body)).json()
            choice = answer["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("pong", "stop")
            assert answer["usage"]["completion_tokens"] == 5
            assert max(worker.requests[-1].sampling.end_token_ids) == end
        parameters = {"adapter_id": "org/own", "details": True}
        details = (await generate(router, **parameters)).json()["details"]
        assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 5)
        body = {"model": "hub:org/own", "prompt": "x", "stop_token_ids": [OWN]}
        answer = (await router.client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "stop"


async def generate(router: Running, **parameters: Any) -> httpx.Response:
    return await router.client.post("/generate", json={"inputs": "x", "parameters": parameters})


async def test_operators_see_them(tmp_path: Path) -> None:
    async def load(load: AdapterLoad) -> AdapterManifest:
        return manifest("any", chat_template=OWN_TEMPLATE, end_token_ids=(PLAIN, EOS))

    async with (
        running_worker(FakeWorker(card())) as worker,
        running_router(tmp_path, worker) as router,
    ):
        worker.loader = load
        body = {"name": "mine", "ref": "hub:org/any"}
        own = [{"id": OWN, "token": "<|own|>"}, {"id": PLAIN, "token": "</plain>"}]
        assert (await router.client.post("/v1/adapters", json=body)).json()["ends"] == own
        assert (await router.client.get("/v1/adapters/mine")).json()["ends"] == own
        base = [{"id": EOS, "token": "<eos>"}, {"id": END, "token": "<|end|>"}]
        assert (await router.client.get("/info")).json()["ends"] == base


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (1.5, 3, 40, {7: -1e6})),
        ({"repetition_penalty": 1.0, "min_tokens": 0, "max_tokens": 9}, (1.0, 0, 9, {7: -1e6})),
        ({"logit_bias": {"7": 2, "8": 1}, "max_tokens": 2}, (1.5, 3, 2, {7: 2.0, 8: 1.0})),
    ],
)
async def test_advice_holds_where_the_caller_says_nothing(
    tmp_path: Path, body: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    advice = {"repetition_penalty": 1.5, "min_tokens": 3.0, "max_tokens": 40.0}
    advised = card(sampling_defaults=advice, suppressed_token_ids=(7,))
    async with (
        running_worker(FakeWorker(advised)) as worker,
        running_router(tmp_path, worker) as router,
    ):
        asked = {"model": BASE_NAME, **body}
        messages = [{"role": "user", "content": "x"}]
        for path, text in (("completions", "x"), ("chat/completions", messages)):
            told = {"prompt" if path == "completions" else "messages": text}
            answer = await router.client.post(f"/v1/{path}", json={**asked, **told})
            assert answer.status_code == 200, answer.text
            assert seen(worker) == expected


async def test_advice_on_lorax_routes(tmp_path: Path) -> None:
    """Nothing of a draw, which is greedy there unless it is asked for."""
    advice = {"temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.5, "min_tokens": 3.0}
    advised = card(sampling_defaults={**advice, "max_tokens": 40.0}, suppressed_token_ids=(7,))
    async with (
        running_worker(FakeWorker(advised)) as worker,
        running_router(tmp_path, worker) as router,
    ):
        assert (await generate(router)).status_code == 200
        assert seen(worker) == (1.5, 3, 40, {7: -1e6})
        assert worker.requests[-1].sampling.temperature == 0
        assert worker.requests[-1].sampling.top_p == 1
        await generate(router, repetition_penalty=1.0, max_new_tokens=9, do_sample=True)
        assert seen(worker) == (1.0, 3, 9, {7: -1e6})
        assert worker.requests[-1].sampling.temperature == 1


def seen(worker: FakeWorker) -> tuple[float, int, int, dict[int, float]]:
    sampling = worker.requests[-1].sampling
    least, most = sampling.min_tokens, sampling.max_tokens
    return sampling.repetition_penalty, least, most, sampling.logit_bias
