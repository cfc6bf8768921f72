"""Who may use the operator's routes of a router without an admin key."""

import pytest

from loraplex.router.call import RequestError
from loraplex.router.config import RouterConfig
from loraplex.router.routes.operator import AdminGate


@pytest.mark.parametrize(
    "host",
    [None, "localhost", "LOCALHOST:8080", "127.0.0.1:80", "127.1.2.3", "[::1]:8080", "[::1]"],
)
def test_this_machine_may(host: str | None) -> None:
    AdminGate(RouterConfig()).check({} if host is None else {"host": host})


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:8080", "10.0.0.1", "localhost.evil.example", "[::2]:1"],
)
def test_a_page_that_took_a_name_to_this_machine_may_not(host: str) -> None:
    with pytest.raises(RequestError) as refused:
        AdminGate(RouterConfig()).check({"host": host})
    assert refused.value.cause == "forbidden"


def test_with_a_key_the_name_does_not_matter() -> None:
    headers = {"origin": "http://evil.example", "host": "evil.example"}
    AdminGate(RouterConfig(admin_key="k")).check({"authorization": "Bearer k", **headers})
