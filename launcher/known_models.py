"""Names that people know the served families by, and one known model of each."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from loraplex.server.model.families.registry import architectures

_FILE = Path(__file__).with_name("known_models.json")


class KnownModel(msgspec.Struct, frozen=True):
    """A family of models that can be served. covers: names of models of the family. example: the
    model whose `config.json` is `config`, with the keys that count.
    """

    covers: str = ""
    example: str = ""
    config: dict[str, Any] = {}


@cache
def served_families() -> dict[str, KnownModel]:
    """Every family of the registry, by `model_type`; one that nobody has described yet is empty."""
    known = msgspec.json.decode(_FILE.read_bytes(), type=dict[str, KnownModel])
    return {name: known.get(name, KnownModel()) for name in sorted(architectures())}
