"""The questions that the fetching process answers. Pure."""

import msgspec

FETCH_S = 10.0


class FetchBegin(msgspec.Struct, frozen=True, array_like=True):
    """Files of the certificate authorities that the operator trusts beside certifi's."""

    cafile: str | None
    capath: str | None


class FetchJob(msgspec.Struct, frozen=True, array_like=True):
    """A picture to fetch. path: with its query. may_be_private: its host may have any address."""

    host: str
    port: int
    path: str
    may_be_private: bool


class FetchOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that the host sent, or why they are not taken."""

    data: bytes = b""
    fault: str | None = None
