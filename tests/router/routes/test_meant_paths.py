"""Paths that clients of other servers use, and the routes that they mean."""

from typing import Any

import pytest

from loraplex.router.api.missing_routes import MEANT
from tests.router.serving import Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": CHAT,
    "/completions": {"prompt": "ab", "max_tokens": 2},
    "/responses": {"input": "ab", "max_output_tokens": 2},
    "/messages": CHAT,
    "/v1/tokenize": {"prompt": "ab"},
    "/v1/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_path_of_another_server_is_the_route_it_means(router: Running, path: str) -> None:
    found = await router.client.post(path, json=BODIES[path])
    meant = await router.client.post(MEANT[path], json=BODIES[path])
    assert found.status_code == meant.status_code == 200, found.text
    assert found.json().keys() == meant.json().keys()


@pytest.mark.parametrize("path", ["/messages", "/completions"])
async def test_its_errors_are_that_routes(router: Running, path: str) -> None:
    found = await router.client.post(path, json={"stop": 5})
    meant = await router.client.post(MEANT[path], json={"stop": 5})
    assert found.json()["error"] == meant.json()["error"]
    assert found.status_code == 400


async def test_models_are_listed(router: Running) -> None:
    found, meant = [await router.client.get(path) for path in ("/models", "/v1/models")]
    assert found.json().keys() == meant.json().keys()
