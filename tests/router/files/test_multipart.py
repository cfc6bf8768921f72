"""Forms, taken apart in any pieces."""

from email.message import EmailMessage

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.router.files.multipart import (
    FormError,
    FormReader,
    PartBegins,
    PartContent,
    PartEnds,
    boundary_of,
)

BOUNDARY = b"edge"
CONTENT = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"\r\n--edg", b"--edge", b"\r\n", b"a", b"\x00\xff"])
).map(b"".join)


def parts_of(body: bytes, sizes: list[int]) -> dict[str, tuple[str | None, bytes]]:
    """sizes: of the pieces in which it comes; the last one is as long as it must be."""
    reader, found, name = FormReader(BOUNDARY), dict[str, tuple[str | None, bytes]](), ""
    events = []
    for size in [*sizes, len(body)]:
        events += reader.feed(body[:size])
        body = body[size:]
    for event in events:
        if isinstance(event, PartBegins):
            name = event.name
            found[name] = event.filename, b""
        elif isinstance(event, PartContent):
            filename, content = found[name]
            found[name] = filename, content + event.content
    assert sum(isinstance(event, PartEnds) for event in events) == len(found)
    assert reader.is_whole
    return found


@given(CONTENT.filter(lambda c: b"\r\n--edge" not in b"\r\n" + c), st.lists(st.integers(0, 40)))
def test_pieces_do_not_matter(content: bytes, sizes: list[int]) -> None:
    body = b"\r\n" if sizes else b""
    body += b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body += b'--edge\r\ncontent-disposition:form-data;name=file;filename="a;b.jsonl"\r\n'
    body += b"Content-Type: text/plain\r\n\r\n" + content + b"\r\n--edge--\r\nafter"
    assert parts_of(body, sizes) == {
        "purpose": (None, b"batch"),
        "file": ("a;b.jsonl", content),
    }


def test_a_clients_form() -> None:
    request = httpx.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": ('ü ".jsonl', b"{}\r\n")}
    )
    boundary = boundary_of(request.headers["content-type"])
    reader = FormReader(boundary)
    events = reader.feed(request.read())
    begun = [event for event in events if isinstance(event, PartBegins)]
    assert [part.name for part in begun] == ["purpose", "file"]
    assert begun[1].filename == 'ü ".jsonl'
    assert PartContent(b"{}\r\n") in events
    assert reader.is_whole


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"]
)
def test_what_is_no_form(content_type: str) -> None:
    with pytest.raises(FormError):
        boundary_of(content_type)
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    with pytest.raises(FormError, match="70"):
        boundary_of(f"multipart/form-data; boundary={'x' * 71}")


@pytest.mark.parametrize(
    "body",
    [
        b"--edge\r\n\r\nno head\r\n--edge--",
        b"--edge\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--edge--",
        b"--edgeX\r\n\r\n",
        b"--edge\r\nX: " + b"x" * 9000,
        b"--edge" + b" " * 9000,
        b"".join(
            b'--edge\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' for _ in "x" * 17
        ),
    ],
)
def test_what_cannot_be_read(body: bytes) -> None:
    with pytest.raises(FormError):
        FormReader(BOUNDARY).feed(body)


@pytest.mark.parametrize(
    "name",
    [
        b"filename*=utf-8''%E2%82%AC.jsonl",
        b"filename*=utf-8''%ff",
        b"filename*=nothing''x",
        'filename="\u20ac.jsonl"'.encode(),
        b"filename*0*=utf-8''%E2; filename*1=b",
    ],
)
def test_names_of_any_spelling(name: bytes) -> None:
    """A name is read, or the form is refused."""
    head = b'--edge\r\nContent-Disposition: form-data; name="file"; ' + name
    try:
        events = FormReader(BOUNDARY).feed(head + b"\r\n\r\nabc\r\n--edge--\r\n")
    except FormError:
        return
    assert isinstance(events[0], PartBegins)
    assert events[0].name == "file"


@pytest.mark.parametrize(
    ("written", "name"),
    [(b"a%22b%0D%0A.jsonl", 'a"b\r\n.jsonl'), (b"50%25 %2f%20%2522", "50%25 %2f%20%2522")],
)
def test_three_characters_are_escaped_in_names(written: bytes, name: str) -> None:
    head = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="' + written
    assert FormReader(BOUNDARY).feed(head + b'"\r\n\r\n')[0] == PartBegins("file", name)


def test_a_form_that_breaks_off() -> None:
    reader = FormReader(BOUNDARY)
    reader.feed(b'--edge\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc')
    assert not reader.is_whole
    message = EmailMessage()
    assert message.get_boundary() is None
