"""Words and header of refusals, as servers write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.refusals import error_text, one_line, retry_after_s


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no such model", "type": "x"}}', "no such model"),
        (b'{"error": "no such model", "error_type": "x"}', "no such model"),
        (b'{"object": "error", "message": "no such model"}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": 1}]}', '[{"loc":1}]'),
        (b'{"error": {}}', '{"error":{}}'),
        (b"<html>\n  <b>gone</b>\x1b[31m", "<html> <b>gone</b>?[31m"),
        (b"", ""),
        (b"3", "3"),
    ],
)
def test_what_servers_say_of_errors(body: bytes, words: str) -> None:
    assert error_text(body) == words


@given(st.binary(max_size=3000))
def test_whatever_is_said_is_one_short_line(body: bytes) -> None:
    for told in (error_text(body), one_line(body)):
        assert len(told) <= 301
        assert told.isprintable()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        *(("soon", None), ("", None), ("-1", None), ("nan", None), ("²", None)),
        ("Thu, 99 Foo 99999 00:00:00 GMT", None),
    ],
)
def test_when_to_come_back(header: str, seconds: float | None) -> None:
    assert retry_after_s(header, now=60.0) == seconds


@given(st.text(max_size=40))
def test_any_header_is_read(header: str) -> None:
    retry_after_s(header, now=60.0)
