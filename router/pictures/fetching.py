"""The process that fetches pictures: no credentials, no redirects, judged addresses, one at a time.

It first reads a FetchBegin. Each question is a FetchJob, answered by a FetchOutcome.
"""

import http.client
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import certifi
import msgspec

from loraplex.adapters.common.web_hosts import MAX_ADDRESSES, is_public, look_up
from loraplex.adapters.helpers.answering import answer_questions, limit_self, read_frame
from loraplex.router.pictures.fetch_job import FETCH_S, FetchBegin, FetchJob, FetchOutcome
from loraplex.server.protocol import MAX_PICTURE_BYTES

_CPU_SECONDS = 5.0
_SILENCE_S = 5.0
_PIECE_BYTES = 256 << 10
_MEMORY_BYTES = 512 << 20
_FILES = 32  # sockets, and the files by which names are looked up


class _Fault(Exception):
    """An answer that is not taken; str() says why."""


def main() -> None:
    begin = msgspec.msgpack.decode(read_frame() or b"", type=FetchBegin)
    trusted = ssl.create_default_context(cafile=certifi.where())
    if begin.cafile or begin.capath:
        trusted.load_verify_locations(begin.cafile, begin.capath)
    limit_self(_MEMORY_BYTES, _FILES)
    decode = msgspec.msgpack.Decoder(FetchJob).decode

    def answer(question: bytes) -> bytes:
        return msgspec.msgpack.encode(fetched(decode(question), trusted))

    answer_questions(answer, _CPU_SECONDS)


def fetched(
    job: FetchJob,
    trusted: ssl.SSLContext,
    lookup: Callable[[str, int], Sequence[str]] = look_up,
) -> FetchOutcome:
    """Fetches one picture. In the process' main thread, where the alarm goes off."""
    try:
        with _alarm():
            return FetchOutcome(_get(job, trusted, lookup))
    except _Fault as fault:
        return FetchOutcome(fault=str(fault))
    except (OSError, UnicodeError, http.client.HTTPException):
        return FetchOutcome(fault="the image's host cannot be reached, or breaks off")


@contextmanager
def _alarm() -> Iterator[None]:
    """Bounds all that a fetch waits for: each read by itself may be short. Raises _Fault."""

    def late(number: int, frame: object) -> None:
        raise _Fault(f"the image does not come within {FETCH_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, FETCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _get(
    job: FetchJob, trusted: ssl.SSLContext, lookup: Callable[[str, int], Sequence[str]]
) -> bytes:
    connection = http.client.HTTPSConnection(job.host, job.port, context=trusted)
    with closing(connection):
        plain = _connected(job, lookup)
        # The certificate must be the host's, whatever its address.
        connection.sock = trusted.wrap_socket(plain, server_hostname=job.host)
        headers = {"accept": "image/*", "accept-encoding": "identity", "user-agent": "loraplex"}
        connection.request("GET", job.path, headers=headers)
        answer = connection.getresponse()
        _check(answer)
        data = bytearray()
        while piece := answer.read1(_PIECE_BYTES):
            data += piece
            if len(data) > MAX_PICTURE_BYTES:
                raise _Fault(f"the image has more than {MAX_PICTURE_BYTES} bytes")
        if answer.length:
            raise _Fault("the image's host breaks off")
        return bytes(data)


def _connected(job: FetchJob, lookup: Callable[[str, int], Sequence[str]]) -> socket.socket:
    """Connects to an address of the host that was judged. Raises OSError."""
    addresses = lookup(job.host, job.port)
    if not job.may_be_private and not all(map(is_public, addresses)):
        raise _Fault("the image's host has a private address")
    failure: OSError = OSError("it has no address")
    for address in addresses[:MAX_ADDRESSES]:
        try:
            return socket.create_connection((address, job.port), _SILENCE_S)
        except OSError as error:
            failure = error
    raise failure


def _check(answer: http.client.HTTPResponse) -> None:
    """Checks an answer before its body is read. Raises _Fault."""
    if 300 <= answer.status < 400:
        raise _Fault("the image's address is a redirect, which is not followed")
    if answer.status != 200:
        raise _Fault(f"the image's host answers HTTP {answer.status}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise _Fault("the image's host compresses, though it was asked not to")
    if (answer.length or 0) > MAX_PICTURE_BYTES:
        raise _Fault(f"the image has more than {MAX_PICTURE_BYTES} bytes")
