"""The operators' routes refuse what they would otherwise ignore, whichever of them it is."""

import json

import httpx
import pytest

from loraplex.router.api.operations import OPERATIONS, Operation
from tests.router.serving import Running

OPERATORS = [one for one in OPERATIONS if one.admin or one.path.startswith("/v1/usage")]
WRITING = [one for one in OPERATORS if one.method != "get" and one.media == "application/json"]


def named(operation: Operation) -> str:
    return f"{operation.method} {operation.path}"


def path_of(operation: Operation) -> str:
    return operation.path.format(name="pirate", id="somebody")


def fault(answer: httpx.Response) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def test_a_query_that_is_not_known(router: Running) -> None:
    for operation in OPERATORS:
        told = await router.client.request(operation.method, f"{path_of(operation)}?surprise=1")
        status, param, message = fault(told)
        assert (status, param) == (400, "surprise"), named(operation)
        assert all(name in message for name in operation.query or ("unknown parameter",))


async def test_a_parameter_is_given_once(router: Running) -> None:
    for operation, name in [(one, name) for one in OPERATORS for name in one.query]:
        path = f"{path_of(operation)}?{name}=a&{name}=b"
        status, param, message = fault(await router.client.request(operation.method, path))
        assert (status, param) == (400, name), named(operation)
        assert "more than once" in message


async def test_a_field_that_is_not_known(router: Running) -> None:
    await router.client.post("/v1/keys", json={"id": "somebody"})
    for operation in WRITING:
        body = {"surprise": 1}
        told = await router.client.request(operation.method, path_of(operation), json=body)
        status, param, message = fault(told)
        assert (status, param) == (400, "surprise"), named(operation)
        known = [name for kind in operation.requests for name in kind.__struct_fields__]
        assert message.startswith("`surprise`: unknown field")
        assert all(name in message for name in known)


async def test_an_owner_in_the_body_is_not_the_fleet(router: Running) -> None:
    for operation in [one for one in WRITING if "tenant" in one.query]:
        body = {"tenant": "acme"}
        told = await router.client.request(operation.method, path_of(operation), json=body)
        status, param, message = fault(told)
        assert (status, param) == (400, "tenant"), named(operation)
        assert operation.requests or "?tenant=" in message


@pytest.mark.parametrize("content", [b"", b"{}"])
async def test_a_body_that_says_nothing(router: Running, content: bytes) -> None:
    """Such as `curl -d ''` sends, under a type that is not JSON's."""
    form = {"content-type": "application/x-www-form-urlencoded"} if not content else {}
    for action in ("load", "pin", "unpin", "refresh", "unload"):
        path = f"/v1/adapters/pirate/{action}"
        answer = await router.client.post(path, content=content, headers=form)
        assert answer.status_code == 200, answer.text


async def test_a_body_that_is_no_json(router: Running) -> None:
    path = "/v1/adapters/pirate/load"
    for body in (b"[1]", b" ", b"\r\n"):
        answer = await router.client.post(path, content=body)
        assert answer.status_code == 400, body
    typed = {"content-type": "text/plain"}
    answer = await router.client.post(path, content=b"{}", headers=typed)
    assert answer.status_code == 415
    answer = await router.client.post(path, content=json.dumps({"x": "y" * (1 << 17)}))
    assert answer.status_code == 413
