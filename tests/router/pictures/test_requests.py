"""Pictures in requests of every API: where they stand in the prompt, and what is refused."""

import asyncio
import base64
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest

from loraplex.router.api.request.pictures import data_of, in_text, placed
from loraplex.router.generation import prompts
from loraplex.router.pictures.fetcher import PictureFetcher
from loraplex.server.protocol import (
    MAX_PICTURE_BYTES,
    ErrorCode,
    GenerateRequest,
    PicturesMissing,
    PictureSpan,
    encode,
)
from tests.router.fake_worker import FakeWorker, ids_of, make_card, running_worker
from tests.router.pictures.seeing import (
    CLOSES,
    OPENS,
    PLACE,
    SMALL,
    TURNED,
    WIDE,
    chat_part,
    data_url,
    seeing_card,
)
from tests.router.serving import Running, running_router
from tests.server.pictures.cards import QWEN
from tests.server.pictures.files import written


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with running_worker(FakeWorker(seeing_card())) as worker:
        yield worker


@pytest.fixture
async def router(tmp_path: Path, worker: FakeWorker) -> AsyncIterator[Running]:
    async with running_router(tmp_path, worker) as router:
        yield router


def seen(tokens: int) -> list[int]:
    return [OPENS, *[PLACE] * tokens, CLOSES]


def span(start: int, tokens: int, data: bytes, *grid: int) -> PictureSpan:
    return PictureSpan(start, tokens, hashlib.sha256(data).hexdigest(), (1, *grid))  # type: ignore[arg-type]


async def chat(router: Running, content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    body = {"model": "", "messages": messages, "max_tokens": 3} | fields
    return await router.client.post("/v1/chat/completions", json=body)


async def test_each_picture_stands_where_the_template_puts_it(
    router: Running, worker: FakeWorker
) -> None:
    parts = [
        {"type": "text", "text": "a"},
        chat_part(data_url(SMALL)),
        {"type": "text", "text": "bc"},
        {"type": "image_url", "image_url": data_url(TURNED, "jpeg")},
        chat_part(data_url(SMALL)),
    ]
    answer = await chat(router, parts, n=2)
    assert answer.status_code == 200, answer.text
    one, other = worker.requests
    wanted = ids_of("<user>a") + seen(4) + ids_of("bc") + seen(12) + seen(4) + ids_of("<assistant>")
    assert one.prompt_ids == other.prompt_ids == wanted
    assert answer.json()["usage"]["prompt_tokens"] == len(wanted)
    assert one.pictures == other.pictures
    assert one.pictures == (
        span(8, 4, SMALL, 4, 4),
        span(16, 12, TURNED, 6, 8),
        span(30, 4, SMALL, 4, 4),
    )


async def test_other_apis_say_the_same(router: Running, worker: FakeWorker) -> None:
    image = data_url(WIDE, "jpeg")
    source = {"type": "base64", "media_type": "image/jpeg", "data": image.partition(",")[2]}
    bodies = {
        "/v1/responses": {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": image, "detail": "auto"},
                    ],
                }
            ],
            "max_output_tokens": 3,
        },
        "/v1/messages": {
            "max_tokens": 3,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image", "source": source},
                    ],
                }
            ],
        },
        "/v1/chat/completions": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, chat_part(image)]}
            ],
            "max_tokens": 3,
        },
    }
    for path, body in bodies.items():
        answer = await router.client.post(path, json={"model": "fake-base"} | body)
        assert answer.status_code == 200, answer.text
        request = worker.requests[-1]
        assert request.prompt_ids == ids_of("<user>a") + seen(8) + ids_of("<assistant>")
        assert request.pictures == (span(8, 8, WIDE, 4, 8),)
    counted = await router.client.post(
        "/v1/messages/count_tokens", json={"model": "fake-base"} | bodies["/v1/messages"]
    )
    assert counted.json() == {"input_tokens": len(request.prompt_ids)}
    asked = {"model": "", "messages": bodies["/v1/chat/completions"]["messages"]}
    tokens = (await router.client.post("/tokenize", json=asked)).json()["tokens"]
    assert tokens == request.prompt_ids


async def test_results_of_tools_hold_pictures(router: Running, worker: FakeWorker) -> None:
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": data_url(SMALL).partition(",")[2],
    }
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = [{"type": "image", "source": source}, {"type": "text", "text": "x"}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}],
        },
    ]
    body = {"model": "fake-base", "max_tokens": 3, "messages": messages}
    answer = await router.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    ids = worker.requests[-1].prompt_ids
    assert ids[ids.index(OPENS) :] == seen(4) + ids_of("x<assistant>")


async def test_texts_of_lorax_mark_pictures(router: Running, worker: FakeWorker) -> None:
    text = f"a![]({data_url(SMALL)})b![words]({data_url(WIDE, 'jpeg')})![x](y)"
    body = {"inputs": text, "parameters": {"max_new_tokens": 3, "details": True}}
    answer = await router.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    request = worker.requests[-1]
    assert request.prompt_ids == ids_of("a") + seen(4) + ids_of("b") + seen(8) + ids_of("![x](y)")
    assert request.pictures == (span(2, 4, SMALL, 4, 4), span(9, 8, WIDE, 4, 8))
    assert answer.json()["details"]["prompt_tokens"] == len(request.prompt_ids)


async def test_sglang_names_pictures_beside_the_prompt(router: Running, worker: FakeWorker) -> None:
    small, wide = data_url(SMALL), data_url(WIDE, "jpeg")
    alone, draws = small.partition(",")[2], {"sampling_params": {"max_new_tokens": 3}}
    spot, text = [OPENS, PLACE, CLOSES], "a<img><pic></img>"
    two = ids_of("a") + seen(4) + ids_of("b") + seen(8)
    for prompt in ({"text": f"{text}b<img><pic></img>"}, {"input_ids": [97, *spot, 98, *spot]}):
        body = {**prompt, "image_data": [alone, wide], **draws}
        answer = await router.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        request = worker.requests[-1]
        assert request.prompt_ids == two
        assert request.pictures == (span(2, 4, SMALL, 4, 4), span(9, 8, WIDE, 4, 8))
        assert answer.json()["meta_info"]["prompt_tokens"] == len(two)
    for images, tokens in ((small, (4, 4)), ([wide, [small]], (8, 4))):
        body = {"text": [text, f"{text}!"], "image_data": images, **draws}
        answer = await router.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        wanted = [ids_of("a") + seen(n) for n in tokens]
        found = sorted((each.prompt_ids for each in worker.requests[-2:]), key=len)
        assert found == sorted([wanted[0], wanted[1] + ids_of("!")], key=len)
    taken = len(worker.requests)
    for fields, param, words in (
        ({"text": "a", "image_data": small}, "text", "0 places for 1 images"),
        ({"text": text, "image_data": "/etc/passwd"}, "image_data[0]", "no base64"),
        ({"text": text, "image_data": "a.png"}, "image_data[0]", "no base64"),
        ({"text": text, "image_data": "file:///a.png"}, "image_data[0]", "not fetched here"),
        ({"text": text, "image_data": ["https://a.b/c.png"]}, "image_data[0]", "not fetched here"),
    ):
        answer = await router.client.post("/generate", json=fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert words in error["message"]
    assert len(worker.requests) == taken


async def test_ids_lack_texts_that_come_around_pictures(tmp_path: Path) -> None:
    card = seeing_card()
    assert card.vision is not None
    card = msgspec.structs.replace(card, vision=msgspec.structs.replace(card.vision, around="\n"))
    async with (
        running_worker(FakeWorker(card)) as worker,
        running_router(tmp_path, worker) as router,
    ):
        body = {"input_ids": [OPENS, PLACE, CLOSES], "image_data": data_url(SMALL)}
        answer = await router.client.post("/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_ids")
        assert "send the prompt as a text" in answer.json()["error"]["message"]


async def test_logprobs_of_the_prompt_have_every_placeholder(
    router: Running, worker: FakeWorker
) -> None:
    answer = await chat(router, [chat_part(data_url(SMALL))], prompt_logprobs=0)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["prompt_logprobs"]) == len(worker.requests[-1].prompt_ids)


def test_spellings_of_data_urls() -> None:
    data = bytes(range(251, 256)) * 7
    text = base64.b64encode(data).decode()
    assert "+" in text
    assert text.endswith("=")
    spellings = (
        *(text, quote(text, safe=""), f" {text[:9]}\r\n{text[9:]}\n"),
        text.replace("+", "-").replace("/", "_"),
    )
    for begin in ("data:image/png;base64,", " DATA:;name=a.png; BASE64,", "data:None;base64,"):
        for spelled in spellings:
            assert data_of(begin + spelled) == data, (begin, spelled)
    assert data_of("https://host/data:image/png;base64,AA") is None


def test_markdown_names_its_scheme_in_any_case() -> None:
    given, text = in_text("a![](DATA:image/png;base64,AA)b", "inputs", "<pic>")
    assert ([one.url for one in given], text) == (["DATA:image/png;base64,AA"], "a<pic>b")


def sized(*, within: bool = False, **sizes: Any) -> dict[str, Any]:
    """A part with sizes beside its address, or within it."""
    part = chat_part(data_url(TURNED, "jpeg"))
    return {**part, "image_url": part["image_url"] | sizes} if within else part | sizes


SIZES: list[tuple[dict[str, Any], dict[str, Any], tuple[int, int], tuple[int, int, int]]] = [
    (sized(max_pixels=4000), {}, (0, 4000), (1, 2, 4)),
    (sized(within=True, max_pixels=4000), {}, (0, 4000), (1, 2, 4)),
    (sized(min_pixels=20_000, max_pixels=50_000), {}, (20_000, 50_000), (1, 10, 12)),
    (sized(), {"max_pixels": 4000}, (0, 4000), (1, 2, 4)),
    (sized(), {"size": {"longest_edge": 4000}, "min_pixels": 784}, (784, 4000), (1, 2, 4)),
    (sized(max_pixels=800), {"max_pixels": 4000, "min_pixels": 784}, (784, 800), (1, 2, 2)),
    (sized(within=True, min_pixels=None), {"max_pixels": None}, (0, 0), (1, 6, 8)),
]


@pytest.mark.parametrize(("part", "options", "pixels", "grid"), SIZES)
async def test_sizes_that_a_request_asks_for(
    router: Running,
    worker: FakeWorker,
    part: dict[str, Any],
    options: dict[str, Any],
    pixels: tuple[int, int],
    grid: tuple[int, int, int],
) -> None:
    answer = await chat(router, [part], mm_processor_kwargs=options)
    assert answer.status_code == 200, answer.text
    (request,) = worker.requests
    (found,) = request.pictures
    tokens = QWEN.form.tokens(grid)
    assert (found.grid, found.length, found.pixels) == (grid, tokens, pixels)
    assert request.prompt_ids == ids_of("<user>") + seen(tokens) + ids_of("<assistant>")


async def test_one_image_in_two_sizes(router: Running, worker: FakeWorker) -> None:
    answer = await chat(router, [sized(), sized(max_pixels=4000), sized()])
    assert answer.status_code == 200, answer.text
    spans = worker.requests[0].pictures
    assert [span.grid for span in spans] == [(1, 6, 8), (1, 2, 4), (1, 6, 8)]
    assert len({span.picture for span in spans}) == 1


@pytest.mark.parametrize(
    ("part", "options", "param", "words"),
    [
        (sized(max_pixels=1 << 24), {}, ".content[0].image_url", "1003520 at most"),
        (sized(min_pixels=1 << 24), {}, ".content[0].image_url", "1003520 at most"),
        (sized(min_pixels=9, max_pixels=8), {}, ".content[0].image_url", "more min_pixels"),
        (
            sized(max_pixels=900) | {"image_url": {"url": "data:", "max_pixels": 800}},
            {},
            ".content[0].image_url.max_pixels",
            "contradicts",
        ),
        (sized(max_pixels="many"), {}, ".content[0].max_pixels", "int"),
        (sized(max_pixels=0), {}, ".content[0].max_pixels", ">= 1"),
        (sized(within=True, max_dynamic_patch=4), {}, ".max_dynamic_patch", "files say how"),
        (sized(), {"do_resize": False}, "mm_processor_kwargs.do_resize", "unknown"),
        (
            sized(),
            {"max_pixels": 1, "size": {"longest_edge": 2}},
            "mm_processor_kwargs.max_pixels",
            "contradicts `mm_processor_kwargs.size`",
        ),
        (sized(), {"max_pixels": 1, "min_pixels": 2}, "mm_processor_kwargs", "more min_pixels"),
    ],
)
async def test_sizes_that_cannot_be(
    router: Running,
    worker: FakeWorker,
    part: dict[str, Any],
    options: dict[str, Any],
    param: str,
    words: str,
) -> None:
    answer = await chat(router, [part], mm_processor_kwargs=options)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].endswith(param), error
    assert words in error["message"]
    assert not worker.requests


BAD = [
    (chat_part("DATA:image/png;base64,\N{SNOWMAN}"), "invalid_image", "no base64"),
    (chat_part("data:image/png,AA=="), "invalid_image", "expected data:image/TYPE"),
    (chat_part("data:image/png;base64,A"), "invalid_image", "no base64"),
    (chat_part(data_url(b"GIF")), "invalid_image", "no PNG, JPEG, WebP or GIF"),
    (chat_part("https://a.b/c.png"), "invalid_image", "not fetched here"),
    (chat_part("file:///etc/passwd"), "invalid_image", "not fetched here"),
    ({"type": "text", "text": "<pic>"}, None, "2 places for 1 images"),
]


@pytest.mark.parametrize(("part", "code", "words"), BAD)
async def test_what_is_no_picture_is_refused_by_name(
    router: Running, worker: FakeWorker, part: dict[str, Any], code: str | None, words: str
) -> None:
    parts = [chat_part(data_url(SMALL)), part]
    answer = await chat(router, parts)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert words in error["message"]
    if code is not None:
        assert error["param"] == "messages[0].content[1].image_url"
    assert not worker.requests


async def test_other_limits(router: Running, worker: FakeWorker) -> None:
    image = chat_part(data_url(SMALL))
    for content, fields, words in (
        ([image] * 129, {}, "at most 128"),
        ([image], {"truncate_prompt_tokens": 9}, "is not cut"),
        ([image] * 128, {}, "the model's context is 512 tokens"),
    ):
        answer = await chat(router, content, **fields)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    long = await router.client.post("/generate", json={"inputs": f"![]({data_url(b'x')})"})
    assert (long.status_code, long.json()["error_type"]) == (422, "validation")
    assert "inputs" in long.json()["error"]
    assert not worker.requests


async def test_a_model_that_reads_none_refuses(tmp_path: Path) -> None:
    card = make_card(blind="of vipllava the text part is served")
    async with running_worker(FakeWorker(card)) as blind, running_router(tmp_path, blind) as router:
        answer = await chat(router, [chat_part(data_url(SMALL))])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert f"reads no images: {card.blind}" in error["message"]
        assert error["param"] == "messages[0].content[0].image_url"
        given = {"text": "a", "image_data": data_url(SMALL)}
        answer = await router.client.post("/generate", json=given)
        assert "reads no images" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "image_data[0]"
        inputs = "![](data:image/png;base64,AA==)"
        marked = await router.client.post("/generate", json={"inputs": inputs})
        assert marked.status_code == 200
        assert blind.requests[-1].prompt_ids == ids_of(inputs)


def test_ids_around_placeholders_come_with_the_picture() -> None:
    form = {"token_id": 9, "spot_id": 7, "before": (5, 5), "after": (6,)}
    vision = msgspec.structs.replace(QWEN, **form)
    ids, parts, spans = placed(
        [1, 7, 2, 7], [*"abcd"], [vision.ids((1, 2, 2)), vision.ids((1, 2, 4))], vision
    )
    assert ids == [1, 5, 5, 9, 6, 2, 5, 5, 9, 9, 6]
    assert parts == ["a", "b", "", "", "", "c", "d", "", "", "", ""]
    assert spans == [(3, 1), (8, 2)]


def test_placeholders_of_a_text_are_refused() -> None:
    vision = msgspec.structs.replace(QWEN, token_id=9, spot_id=7)
    with pytest.raises(ValueError, match="beside those of its images"):
        placed([1, 7, 9], [], [vision.ids((1, 2, 2))], vision)


async def test_text_comes_around_pictures_before_the_prompt_is_encoded(tmp_path: Path) -> None:
    seeing = seeing_card()
    assert seeing.vision is not None
    vision = msgspec.structs.replace(seeing.vision, around="^")
    card = msgspec.structs.replace(seeing, vision=vision)
    async with (
        running_worker(FakeWorker(card)) as worker,
        running_router(tmp_path, worker) as router,
    ):
        await chat(router, [chat_part(data_url(SMALL))])
        await chat(router, "<pic>")
        opens, closes = ids_of("<user>"), ids_of("<assistant>")
        seen = [OPENS, *ids_of("^"), *[PLACE] * 4, *ids_of("^"), CLOSES]
        found = [request.prompt_ids for request in worker.requests]
        assert found == [[*opens, *seen, *closes], [*opens, PLACE, *closes]]


async def test_many_tokens_are_placed_beside_the_event_loop(
    router: Running, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def spied(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return placed(*arguments)

    monkeypatch.setattr(prompts, "placed", spied)
    large = written("PNG", "L", 980, 980)
    answer = await chat(router, [chat_part(data_url(large))] * 16)
    assert "the model's context is 512 tokens" in answer.json()["error"]["message"]
    assert (await chat(router, [chat_part(data_url(SMALL))])).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_images_of_a_request_have_room_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All conversations share the room; an image that stands there twice is read once."""
    fetched: list[str] = []

    async def fetch(self: PictureFetcher, url: str, where: str) -> bytes:
        fetched.append(url)
        return SMALL + url.encode().rjust(MAX_PICTURE_BYTES - len(SMALL))

    monkeypatch.setattr(PictureFetcher, "fetch", fetch)
    parts = [chat_part(f"https://images.test/{i}.png") for i in range(5)]
    async with (
        running_worker(FakeWorker(seeing_card())) as worker,
        running_router(tmp_path, worker) as router,
    ):
        answer = await chat(router, [parts[0]] * 3 + parts)
        assert "bytes in all" in answer.json()["error"]["message"]
        assert fetched == [part["image_url"]["url"] for part in parts[:4]]
        fetched.clear()
        said = [[{"role": "user", "content": parts[i : i + 2]}] for i in (0, 2, 3)]
        body = {"model": "", "messages": said, "max_tokens": 3}
        answer = await router.client.post("/v1/chat/completions/batch", json=body)
        assert "bytes in all" in answer.json()["error"]["message"]
        assert len(fetched) == 4
        assert not worker.requests


async def test_a_template_without_images_refuses(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    card = seeing_card(chat_template=template)
    async with (
        running_worker(FakeWorker(card)) as worker,
        running_router(tmp_path, worker) as router,
    ):
        answer = await chat(router, [chat_part(data_url(SMALL))])
        assert answer.status_code == 400
        assert "the chat template reads no images" in answer.json()["error"]["message"]


async def test_a_sequence_whose_image_cannot_be_sent_goes_on_elsewhere(
    router: Running, worker: FakeWorker
) -> None:
    """The worker asks for a file, and takes none."""

    async def ask(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        if request.attempt == 0:
            identity = (request.request_id, request.attempt, request.choice)
            missing = PicturesMissing(*identity, (request.pictures[0].picture,))
            await worker.send_raw(encode(missing))
            await asyncio.Event().wait()
        return None

    worker.before_token = ask
    answer = await chat(router, [chat_part(data_url(SMALL))])
    assert answer.status_code == 200, answer.text
    assert [request.attempt for request in worker.requests] == [0, 1]
    assert len(worker.aborts) == 1


async def test_what_the_decoder_says_is_the_answer(router: Running, worker: FakeWorker) -> None:
    async def fail(worker: FakeWorker, request: GenerateRequest, index: int) -> ErrorCode | None:
        return "invalid_image"

    worker.before_token = fail
    answer = await chat(router, [chat_part(data_url(SMALL))])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
    assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/responses", "input"), ("/v1/messages", "messages")]
)
async def test_bodies_of_other_apis_have_names_of_their_own(
    router: Running, path: str, field: str
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image: dict[str, Any] = {"type": "image", "source": source}
    if path == "/v1/responses":
        image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    said = [{"role": "user", "content": [image]}]
    body = {"model": "fake-base", "max_tokens": 3, "messages": said}
    if path == "/v1/responses":
        body = {"model": "fake-base", "input": said}
    answer = await router.client.post(path, json=body)
    assert answer.status_code == 400
    assert f"`{field}, image 1`: the file is no PNG" in answer.json()["error"]["message"]
