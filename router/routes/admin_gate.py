"""Guards the operator's routes: they need the admin key; without one, only this machine may
call."""

import hashlib
import hmac

from loraplex.adapters.common.loopback import is_loopback
from loraplex.router.call import RequestError
from loraplex.router.config import RouterConfig


class AdminGate:
    """`check` is asked with the headers of each request of a lifecycle route."""

    def __init__(self, config: RouterConfig) -> None:
        self._key = _digest(config.admin_key) if config.admin_key else None
        self._is_local = is_loopback(config.host)

    def check(self, authorization: str | None, origin: str | None, host: str | None) -> None:
        """host: that header. Raises RequestError: unauthorized (401), forbidden (403)."""
        if self._key is None:
            self._check_open(origin, host)
            return
        scheme, _, given = (authorization or "").partition(" ")
        is_right = hmac.compare_digest(_digest(given.strip()), self._key)
        if scheme.lower() != "bearer" or not given.strip():
            message = "this route wants the admin key, as `Authorization: Bearer KEY`: none came"
            raise RequestError("unauthorized", message)
        if not is_right:
            raise RequestError("unauthorized", "the key is wrong: this route wants the admin key")

    def opens(self, authorization: str | None, origin: str | None, host: str | None) -> bool:
        """Whether `check` lets this request in."""
        try:
            self.check(authorization, origin, host)
        except RequestError:
            return False
        return True

    def _check_open(self, origin: str | None, host: str | None) -> None:
        if not self._is_local:
            raise RequestError(
                "forbidden",
                "this route is closed, as the router has no admin key: start it with "
                "--admin-key-file or LORAPLEX_ADMIN_KEY",
            )
        # A page in a browser of this machine is not its operator.
        if origin is not None:
            raise RequestError(
                "forbidden",
                "requests from web pages need an admin key: start the router with "
                "--admin-key-file or LORAPLEX_ADMIN_KEY",
            )
        # A page whose own name now resolves to this machine sends no origin with a GET. A proxy
        # that gives the router a public name sends none at all.
        if host is not None and not is_loopback(_name_of(host)):
            raise RequestError(
                "forbidden",
                "requests for other hosts than this machine's loopback addresses need an admin "
                "key: start the router with --admin-key-file or LORAPLEX_ADMIN_KEY",
            )


def _name_of(host: str) -> str:
    """The header without its port: `localhost:8080`, `127.0.0.1`, `[::1]:8080`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _digest(key: str) -> bytes:
    """Keys of any length compare in the same time."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
