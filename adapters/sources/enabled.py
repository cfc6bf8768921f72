"""The sources that the operator enabled."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from loraplex.adapters.common import extras
from loraplex.adapters.content_check import Run
from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import MODELSCOPE_ENDPOINT, RefSource, is_bucket, is_owner
from loraplex.adapters.sources.base import LateSource, Source
from loraplex.adapters.sources.https import HttpsSource
from loraplex.adapters.sources.local import LocalSource
from loraplex.adapters.sources.modelscope import ModelScopeSource


def open_sources(
    hub_owners: Sequence[str] = (),
    roots: Sequence[Path] = (),
    s3_buckets: Sequence[str] = (),
    https_hosts: Sequence[str] = (),
    modelscope_owners: Sequence[str] = (),
    modelscope_endpoint: str = MODELSCOPE_ENDPOINT,
    run: Run = map,
) -> dict[RefSource, Source]:
    """Opens the enabled sources. S3, HTTPS and ModelScope need a bucket, host or owner each. run:
    see LocalSource. Raises AdapterError for an option that cannot hold."""
    for owner in hub_owners:
        _require(is_owner(owner), f"--hub-owner {owner!r}: expected one owner's name")
    for root in roots:
        # Whether it is a slip or a disk that is not mounted: nothing under it could be served.
        _require(
            os.path.isdir(root.expanduser()), f"--adapter-root {root}: there is no such folder"
        )
    for bucket in s3_buckets:
        _require(is_bucket(bucket), f"--s3-bucket {bucket!r}: expected a bucket's name")
    for owner in modelscope_owners:
        is_good = owner == "*" or is_owner(owner)
        _require(is_good, f"--modelscope-owner {owner!r}: expected one owner's name, or *")
    _require(
        re.fullmatch(r"https?://[^/?#@\s]+/?", modelscope_endpoint),
        f"--modelscope-endpoint {modelscope_endpoint!r}: expected https://host",
    )
    sources: dict[RefSource, Source] = {"hub": open_hub(hub_owners)}
    sources["local"] = LocalSource(roots, run)
    if s3_buckets:
        sources["s3"] = _s3(s3_buckets)
    if https_hosts:
        sources["https"] = HttpsSource(https_hosts)
    if modelscope_owners:
        sources["modelscope"] = ModelScopeSource(modelscope_owners, modelscope_endpoint)
    return sources


def open_hub(owners: Sequence[str] = ()) -> Source:
    """Opens the Hub. owners: those allowed; none = all."""

    def opened() -> Source:
        from loraplex.adapters.sources.hub import HubSource

        return HubSource(owners=owners)

    return LateSource(opened)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise AdapterError("bad_ref", message)


def _s3(buckets: Sequence[str]) -> Source:
    """Makes the source for S3. It is imported when it is wanted: boto3 is an extra."""
    try:
        from loraplex.adapters.sources.s3 import S3Source
    except ModuleNotFoundError as error:
        raise AdapterError("unavailable", f"S3: {extras.sentence(error, 's3')}") from None
    return S3Source(buckets)
