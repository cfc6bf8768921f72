"""Pictures in uploaded files: of the same tenant alone, within bounds, and in lines of batches."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.server.protocol import MAX_PICTURE_BYTES, PictureSpan
from tests.router.batches.running_batches import BatchUser
from tests.router.fake_worker import FakeWorker, ids_of, running_worker
from tests.router.files.test_files import KEYS, keyed_router
from tests.router.pictures.seeing import (
    CLOSES,
    OPENS,
    PLACE,
    SMALL,
    WIDE,
    chat_part,
    data_url,
    seeing_card,
)
from tests.router.serving import Running, running_router

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
VISION = {"purpose": "vision"}


def body_of(path: str, *file_ids: str) -> dict[str, Any]:
    """A request of the route with a text and files as its images."""
    if path == RESPONSES:
        text = {"type": "input_text", "text": "a"}
        parts = [{"type": "input_image", "file_id": name, "detail": "auto"} for name in file_ids]
        return {
            "model": "fake-base",
            "input": [{"role": "user", "content": [text, *parts]}],
            "max_output_tokens": 3,
        }
    blocks = [{"type": "image", "source": {"type": "file", "file_id": name}} for name in file_ids]
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}, *blocks]}]
    return {"model": "fake-base", "max_tokens": 3, "messages": said}


def span(start: int, tokens: int, data: bytes, *grid: int) -> PictureSpan:
    return PictureSpan(start, tokens, hashlib.sha256(data).hexdigest(), (1, *grid))  # type: ignore[arg-type]


async def post(router: Running, path: str, body: Any, key: str = "acme") -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS.get(key, key)}"}
    return await router.client.post(path, json=body, headers=headers)


async def test_uploaded_files_are_images_of_their_tenant(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker(seeing_card())) as worker,
        keyed_router(tmp_path, worker) as router,
    ):
        acme = BatchUser(router, KEYS["acme"])
        wide = await acme.upload(WIDE, fields={"purpose": "user_data"})
        small = await acme.upload(SMALL, fields=VISION)
        assert (wide["purpose"], small["purpose"]) == ("user_data", "vision")
        seen = [*[OPENS, *[PLACE] * 8, CLOSES], *[OPENS, *[PLACE] * 4, CLOSES]]
        ids = ids_of("<user>a") + seen + ids_of("<assistant>")
        for path in (RESPONSES, MESSAGES):
            body = body_of(path, wide["id"], small["id"])
            answer = await post(router, path, body)
            assert answer.status_code == 200, answer.text
            assert worker.requests[-1].prompt_ids == ids
            wanted = (span(8, 8, WIDE, 4, 8), span(18, 4, SMALL, 4, 4))
            assert worker.requests[-1].pictures == wanted
            foreign = await post(router, path, body, "other")
            assert foreign.status_code == 404
            assert "no file" in foreign.text
            assert (await post(router, path, body, "nobody")).status_code == 401
        counted = await post(router, f"{MESSAGES}/count_tokens", body_of(MESSAGES, wide["id"]))
        assert counted.json() == {"input_tokens": len(ids) - 6}
        assert len(worker.requests) == 2
        await acme.call("DELETE", f"/v1/files/{wide['id']}")
        for gone in (wide["id"], "file-x", "../../etc/passwd"):
            assert (await post(router, RESPONSES, body_of(RESPONSES, gone))).status_code == 404


async def test_a_key_without_a_rate_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    async def note(self: object, file_id: str, where: str) -> bytes:
        read.append(file_id)
        return SMALL

    monkeypatch.setattr("loraplex.router.pictures.uploaded.UploadedPictures.data", note)
    async with (
        running_worker(FakeWorker(seeing_card())) as worker,
        keyed_router(tmp_path, worker, admin_key="root") as router,
    ):
        limited = {"id": "brief", "limits": {"requests_per_minute": 1}}
        made = await post(router, "/v1/keys", limited, "root")
        key = made.json()["key"]
        found = [await post(router, RESPONSES, body_of(RESPONSES, "f"), key) for _ in range(2)]
        assert [answer.status_code for answer in found] == [200, 429], found[0].text
        assert read == ["f"]
        made = await post(router, "/v1/keys", limited | {"id": "counts"}, "root")
        key, path = made.json()["key"], f"{MESSAGES}/count_tokens"
        found = [await post(router, path, body_of(MESSAGES, "f"), key) for _ in range(2)]
        assert [answer.status_code for answer in found] == [200, 429], found[0].text
        assert read == ["f"] * 2


async def test_what_files_are_refused(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker(seeing_card())) as worker,
        running_router(tmp_path, worker, files_dir=tmp_path / "files") as router,
    ):
        user = BatchUser(router)
        lines = await user.upload(SMALL)
        large = await user.upload(bytes(MAX_PICTURE_BYTES + 1), fields=VISION)
        half = SMALL + bytes(MAX_PICTURE_BYTES // 2)
        halves = [(await user.upload(half, fields=VISION))["id"] for _ in range(2)]
        broken = await user.upload(b"GIF", fields=VISION)
        for file_ids, words in (
            ([lines["id"]], "the file's purpose is 'batch', expected vision or user_data"),
            ([large["id"]], f"more than {MAX_PICTURE_BYTES} bytes"),
            (halves, "more than 20971520 bytes together"),
            ([broken["id"]], "no PNG, JPEG, WebP or GIF"),
        ):
            answer = await post(router, RESPONSES, body_of(RESPONSES, *file_ids))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_image")
            assert words in error["message"]
            assert error["param"] == f"input, image {len(file_ids)}"
        twice = await post(router, RESPONSES, body_of(RESPONSES, halves[0], halves[0]))
        assert twice.status_code == 200, twice.text  # it is read once
        wanted = {"input_file_id": halves[0], "endpoint": RESPONSES, "completion_window": "24h"}
        error = (await user.call("POST", "/v1/batches", 400, json=wanted))["error"]
        assert "is 'vision', not 'batch'" in error["message"]
        both = body_of(RESPONSES, halves[0])
        both["input"][0]["content"][1]["image_url"] = data_url(SMALL)
        error = (await post(router, RESPONSES, both)).json()["error"]
        assert error["param"] == "input[0].content[1].file_id"


async def test_without_a_folder_there_are_no_files(tmp_path: Path) -> None:
    async with (
        running_worker(FakeWorker(seeing_card())) as worker,
        running_router(tmp_path, worker) as router,
    ):
        answer = await post(router, MESSAGES, body_of(MESSAGES, "file-x"))
        assert answer.status_code == 400
        assert "the router has no --files-dir" in answer.json()["error"]["message"]


async def test_lines_of_batches_have_images(tmp_path: Path) -> None:
    """By data URLs up to the bound of a line, and by uploaded files."""
    async with (
        running_worker(FakeWorker(seeing_card())) as worker,
        running_router(tmp_path, worker, files_dir=tmp_path / "files") as router,
    ):
        user = BatchUser(router)
        room = router.service.config.max_body_bytes
        photo = SMALL + bytes(room * 3 // 4 - 1000)  # almost a body's bound as base64
        file = await user.upload(WIDE, fields=VISION)

        def line(name: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return {"custom_id": name, "method": "POST", "url": path, "body": body}

        def chat(name: str, data: bytes) -> dict[str, Any]:
            said = [{"role": "user", "content": [chat_part(data_url(data))]}]
            return line(name, CHAT, {"model": "fake-base", "messages": said, "max_tokens": 3})

        lines = [chat("small", SMALL), chat("photo", photo), chat("bad", b"GIF")]
        lines += [chat("body", SMALL + bytes(room * 3 // 4)), chat("line", bytes(room))]
        over = await user.until_over((await user.start(lines, CHAT))["id"])
        assert sorted(await user.answers(over["output_file_id"])) == ["photo", "small"]
        failed = await user.answers(over["error_file_id"])
        assert failed["bad"]["response"]["body"]["error"]["code"] == "invalid_image"
        assert failed["body"]["response"]["status_code"] == 413
        assert [one["error"]["code"] for one in failed.values() if one["error"]] == [
            "line_too_long"
        ]
        for path in (RESPONSES, MESSAGES):
            lines = [line("file", path, body_of(path, file["id"]))]
            over = await user.until_over((await user.start(lines, path))["id"])
            assert over["request_counts"]["completed"] == 1
            assert worker.requests[-1].pictures == (span(8, 8, WIDE, 4, 8),)
