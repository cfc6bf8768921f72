"""Numbers and names of queries: within their bounds, and blamed by their own parameter."""

import pytest

from loraplex.router.api.admin.keys import parse_count
from loraplex.router.api.admin.pages import parse_page
from loraplex.router.api.admin.uploads import parse_upload
from loraplex.router.call import RequestError


def test_whole_numbers() -> None:
    assert parse_upload({"keep": "32"}) == (32, False)
    assert parse_page({"limit": "0007"}).limit == 7
    assert parse_count({"limit": "1000"}) == 1000


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "x", "²", "33", "0033", "00329999"])
def test_refused_numbers(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_upload({"keep": text})
    assert caught.value.param == "keep"


@pytest.mark.parametrize("text", ["", "0", "1001", "00001", "-1", "²"])
def test_refused_limits(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_page({"limit": text})
    assert caught.value.param == "limit"


@pytest.mark.parametrize("param", ["search", "after"])
def test_refused_names(param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_page({param: "a\n"})
    assert caught.value.param == param
