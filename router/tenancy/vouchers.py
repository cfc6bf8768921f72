"""How this process speaks for a caller whose request it does later: no key is kept for that."""

import hmac
import secrets

VOUCHER_SCHEME = "Batch"


class Vouchers:
    """Values of the header `Authorization` that nobody else can make."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(32)

    def header(self, tenant: str, key_id: str) -> str:
        return f"{VOUCHER_SCHEME} {self._secret}:{tenant}:{key_id}"

    def read(self, given: str) -> tuple[str, str] | None:
        """The tenant and the key's id; None = it is not from here."""
        secret, _, who = given.partition(":")
        if not hmac.compare_digest(secret.encode("utf-8", "replace"), self._secret.encode()):
            return None
        tenant, _, key_id = who.partition(":")
        return tenant, key_id
