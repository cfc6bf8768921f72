"""HTTPS: connections are accepted and shake hands within the caps and deadlines of all others."""

import asyncio
import errno
import logging
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from loraplex.router.config import RouterConfigError
from loraplex.router.file_stamp import Stamp, stamp_of
from loraplex.router.http.protocol import BoundedHttpProtocol
from loraplex.router.policy.front_door import FrontDoor, HttpDeadlines
from loraplex.router.telemetry.metrics import RouterMetrics

logger = logging.getLogger(__name__)

FILE_POLL_S = 10.0
_NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S = 1.0
_MAX_PEM_BYTES = 1 << 20
_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----")
_PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----")
# What OpenSSL says of a key of another certificate; the last one if its kind is another, too.
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_ENCRYPTED = re.compile(rb"-----BEGIN ENCRYPTED PRIVATE KEY-----|Proc-Type: 4,ENCRYPTED")


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A server's TLS context. cert: the chain. key: plain. Both PEM. Raises RouterConfigError."""
    if not _CERTIFICATE.search(_read(cert, "--tls-cert")):
        raise RouterConfigError(f"--tls-cert {cert}: it holds no certificate in PEM")
    secret = _read(key, "--tls-key")
    if not _PRIVATE_KEY.search(secret):
        raise RouterConfigError(f"--tls-key {key}: it holds no private key in PEM")
    if _ENCRYPTED.search(secret):
        raise RouterConfigError(
            f"--tls-key {key}: it is encrypted, and nobody is there to be asked for its "
            "passphrase: give it decrypted (`openssl pkey -in KEY -out PLAIN`)"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_verify_locations(cafile=cert)
    except ssl.SSLError as error:
        raise RouterConfigError(f"--tls-cert {cert}: {_why(error)}") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason.startswith(("EE_", "CA_")):  # such as EE_KEY_TOO_SMALL
            raise RouterConfigError(f"--tls-cert {cert}: {_why(error)}") from error
        is_other = reason in _OTHER_KEY
        why = f"it is not the key of the certificate in {cert}" if is_other else _why(error)
        raise RouterConfigError(f"--tls-key {key}: {why}") from error
    return context


def _read(path: Path, option: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_PEM_BYTES)
    except OSError as error:
        raise RouterConfigError(f"{option} {path}: {error.strerror}") from error


def _why(error: ssl.SSLError) -> str:
    """OpenSSL's reason in words; it has none for PEM that breaks off."""
    return f"OpenSSL says {error.reason}" if error.reason else "its PEM is damaged"


class Certificate:
    """The certificate of the handshakes from now on: chain and key as the files last had them.

    Raises RouterConfigError if they cannot be used at the start.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        self._files = (cert, key)
        self._seen = self._stamps()
        self.context = server_context(cert, key)

    async def follow(self) -> None:
        """Follows the files until cancelled: takes what a renewal wrote. Files that cannot be used
        change nothing, and are logged once. A chain and its key may change one after the other;
        they are tried again with the second.
        """
        while True:
            await asyncio.sleep(FILE_POLL_S)
            now = await asyncio.to_thread(self._stamps)
            if now == self._seen:
                continue
            self._seen = now
            try:
                self.context = await asyncio.to_thread(server_context, *self._files)
                logger.info("TLS: %s and %s read again", *self._files)
            except RouterConfigError as error:
                logger.error("TLS: the certificate stays as it was: %s", error)

    def _stamps(self) -> list[Stamp | None]:
        return [stamp_of(file) for file in self._files]


class TlsAcceptor:
    """Counts a connection from its first moment, as `loop.create_server(ssl=…)` does not: asyncio
    reports one only when its handshake is over. A connection keeps the certificate that it began
    with.

    make_protocol: of a connection. Once it has shaken hands and begins, its place
    at the door is its own.
    """

    def __init__(
        self,
        certificate: Certificate,
        door: FrontDoor,
        deadlines: HttpDeadlines,
        metrics: RouterMetrics,
        make_protocol: Callable[[], BoundedHttpProtocol],
    ) -> None:
        self.certificate = certificate
        self._door = door
        self._deadlines = deadlines
        self._metrics = metrics
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()

    async def accept(self, listener: socket.socket) -> None:
        """Accepts connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_MORE_FILES:
                    logger.error("cannot accept connections: %s", error.strerror)
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue  # else this one is gone before it was accepted: accept(2)
            self._admit(accepted)

    def _admit(self, accepted: socket.socket) -> None:
        self._metrics.connections.inc()
        if not self._door.enter():
            self._door.leave()
            self._metrics.connections_refused.inc()
            accepted.close()  # without TLS nothing can be said
            return
        task = asyncio.get_running_loop().create_task(self._shake(accepted))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _shake(self, accepted: socket.socket) -> None:
        protocol = self._make_protocol()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=self.certificate.context,
                ssl_handshake_timeout=self._deadlines.head_s,
                ssl_shutdown_timeout=self._deadlines.reader_s,
            )
        except OSError:  # no TLS, too slow, or gone
            self._metrics.connections_cut.labels("handshake_failed").inc()
        finally:
            if not protocol.began:
                self._door.leave()
