"""Batches of a router in the test's process: files sent, batches made, answers read."""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from loraplex.server.protocol import ErrorCode, GenerateRequest
from tests.router.fake_worker import BASE_NAME, FakeWorker
from tests.router.serving import Running, poll

ROUTE = "/v1/completions"
NO_FIELDS: Mapping[str, str] = {}
OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: Any, model: str = BASE_NAME, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": f"say {custom_id}", "max_tokens": 40, **more}
    return {"custom_id": custom_id, "method": "POST", "url": ROUTE, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    texts = (text if isinstance(text, bytes) else json.dumps(text).encode() for text in lines)
    return b"".join(text + b"\n" for text in texts)


class Held:
    """A worker whose sequences wait for `open`."""

    def __init__(self, worker: FakeWorker) -> None:
        self.open = asyncio.Event()
        worker.before_token = self._wait

    async def _wait(
        self, worker: FakeWorker, request: GenerateRequest, index: int
    ) -> ErrorCode | None:
        await self.open.wait()
        return None


async def until(condition: Callable[[], bool]) -> None:
    async def met() -> bool:
        return condition()

    await poll(met)


class BatchUser:
    """headers: with its key, if it has one."""

    def __init__(self, router: Running, key: str = "") -> None:
        self._http = router.client
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def call(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        answer = await self._http.request(method, path, headers=self._headers, **more)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def upload(
        self, content: bytes, status: int = 200, fields: Mapping[str, str] = NO_FIELDS
    ) -> Any:
        form = {"purpose": "batch", **fields}
        files = {"file": ("in.jsonl", content)}
        return await self.call("POST", "/v1/files", status, data=form, files=files)

    async def start(self, lines: Sequence[Any], endpoint: str = ROUTE, **more: Any) -> Any:
        file = await self.upload(jsonl(lines))
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        return await self.call("POST", "/v1/batches", json={**body, **more})

    async def batch(self, batch_id: str) -> Any:
        return await self.call("GET", f"/v1/batches/{batch_id}")

    async def until_over(self, batch_id: str) -> Any:
        async def is_over() -> bool:
            return (await self.batch(batch_id))["status"] in OVER

        await poll(is_over)
        return await self.batch(batch_id)

    async def answers(self, file_id: str | None) -> dict[Any, Any]:
        """By custom_id; a line that is answered twice is an error."""
        if file_id is None:
            return {}
        answer = await self._http.get(f"/v1/files/{file_id}/content", headers=self._headers)
        assert answer.status_code == 200, answer.text
        records = [json.loads(text) for text in answer.text.splitlines()]
        assert len({record["id"] for record in records}) == len(records)
        return {record["custom_id"]: record for record in records}
