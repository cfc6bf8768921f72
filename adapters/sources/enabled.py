"""The sources that the operator enabled."""

from collections.abc import Sequence
from pathlib import Path

from adapters.errors import AdapterError
from adapters.ref import RefSource
from adapters.sources.base import Source
from adapters.sources.https import HttpsSource
from adapters.sources.hub import HubSource
from adapters.sources.local import LocalSource


def open_sources(
    hub_owners: Sequence[str] = (),
    roots: Sequence[Path] = (),
    s3_buckets: Sequence[str] = (),
    https_hosts: Sequence[str] = (),
) -> dict[RefSource, Source]:
    """No bucket, no S3; no host, no HTTPS. Raises AdapterError for an option that cannot hold."""
    sources: dict[RefSource, Source] = {"hub": HubSource(owners=hub_owners)}
    sources["local"] = LocalSource(roots)
    if s3_buckets:
        sources["s3"] = _s3(s3_buckets)
    if https_hosts:
        sources["https"] = HttpsSource(https_hosts)
    return sources


def _s3(buckets: Sequence[str]) -> Source:
    """Imported when it is wanted: boto3 is an extra."""
    try:
        from adapters.sources.s3 import S3Source
    except ModuleNotFoundError as error:
        message = f"adapters from S3 need {error.name}: pip install 'loraplex[s3]'"
        raise AdapterError("unavailable", message) from None
    return S3Source(buckets)
