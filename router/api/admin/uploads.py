"""Shapes of uploads. Pure."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from loraplex.router.api.admin.adapters import AdapterObject
from loraplex.router.api.request.body import require, whole_number
from loraplex.router.names.registration import MAX_KEPT

UPLOAD_QUERY = ("tenant", "keep", "replace")


class AdapterFiles(msgspec.Struct, frozen=True):
    """An upload as a form: a part for each file, named as PEFT names them. Other files that say
    something of an adapter may come, too.
    """

    config: Annotated[str, Meta(extra_json_schema={"format": "binary"})] = msgspec.field(
        name="adapter_config.json"
    )
    weights: Annotated[str, Meta(extra_json_schema={"format": "binary"})] = msgspec.field(
        name="adapter_model.safetensors"
    )


class Uploaded(msgspec.Struct, frozen=True):
    """Answer to an upload. upload: a reference to its files. missing: workers that do not have it,
    by id, and why.
    """

    version: int
    upload: str
    missing: dict[str, str]
    adapter: AdapterObject


class Received(msgspec.Struct, frozen=True):
    """Answer to a part of an upload. received: bytes from the start that are here."""

    received: int


def parse_upload(query: Mapping[str, str]) -> tuple[int | None, bool]:
    """How many versions an upload's name keeps (None = as before), and whether it may take the
    place of what is no upload. Raises RequestError.
    """
    keep, replace = query.get("keep"), query.get("replace", "false")
    count = None if keep is None else whole_number(keep, 1, MAX_KEPT, "keep")
    require(replace in ("true", "false"), "expected true or false", "replace")
    return count, replace == "true"
