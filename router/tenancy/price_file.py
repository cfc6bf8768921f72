"""The file of `--prices`."""

from pathlib import Path

import msgspec

from loraplex.router.api.request.body import field_fault
from loraplex.router.policy.prices import PriceTable

MAX_FILE_BYTES = 1 << 20


class PricesError(Exception):
    """The file cannot be used; str() says why."""


def read_prices(file: Path) -> PriceTable:
    """Reads prices from YAML 1.1, of which JSON is a part. Raises PricesError."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PricesError(f"it cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise PricesError(f"it may have at most {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.yaml.decode(data, type=PriceTable)
    except msgspec.ValidationError as error:
        raise PricesError(str(field_fault(error, PriceTable))) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise PricesError(" ".join(str(error).split())) from None
