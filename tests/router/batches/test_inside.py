"""Lines of batches as requests to the router that runs them."""

import json

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.router.batches.inside import InsideAnswer, InsideDoor


def door_to(app: ASGIApp) -> InsideDoor:
    door = InsideDoor()
    door.app = app
    return door


async def test_a_line_comes_as_a_request() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        said = [request.method, request.url.path, dict(request.headers), request.state.place]
        answer = [*said, request.client, (await request.body()).decode()]
        headers = {"x-request-id": "r1", "retry-after": "2.5"}
        await JSONResponse(answer, 429, headers)(scope, receive, send)

    answer = await door_to(app).ask("/v1/completions", b"{}", "Batch \xe9", place=7)
    assert (answer.status, answer.request_id, answer.retry_after_s) == (429, "r1", 2.5)
    host = {"host": "loraplex-batch", "user-agent": "loraplex-batch"}
    body = {
        "content-type": "application/json",
        "content-length": "2",
        "authorization": "Batch \xe9",
    }
    wanted = ["POST", "/v1/completions", host | body, 7, None, "{}"]
    assert json.loads(answer.content) == wanted


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([], InsideAnswer(500, None, None, b"")),
        (
            [
                {"type": "http.response.start", "status": 200, "headers": []},
                {"type": "http.response.body", "body": b"ab", "more_body": True},
            ],
            InsideAnswer(200, None, None, b"ab"),
        ),
    ],
)
async def test_what_breaks_off_is_an_answer(messages: list[Message], answer: InsideAnswer) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    assert await door_to(app).ask("/", b"", "") == answer
