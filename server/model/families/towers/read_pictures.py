"""Readers of encoders of pictures within larger models, by the model's type. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.towers.gemma_towers import (
    read_gemma3,
    read_gemma4,
    read_unified,
)
from loraplex.server.model.families.towers.llava_towers import (
    read_idefics3,
    read_internvl,
    read_llava,
    read_llava_next,
    read_mistral3,
)
from loraplex.server.model.families.towers.qwen_towers import (
    read_qwen2,
    read_qwen3,
    read_qwen25,
    read_qwen35,
)
from loraplex.server.model.families.towers.tower_parts import ReadPictures
from loraplex.server.model.spec.model_spec import AttentionSpec, Branch, ModelSpec
from loraplex.server.model.spec.picture_spec import PictureSpec

_VISION = "vision_config"
_READERS: dict[str, ReadPictures] = {
    "gemma3": read_gemma3,
    "gemma4": read_gemma4,
    "gemma4_unified": read_unified,
    "idefics3": read_idefics3,
    "internvl": read_internvl,
    "llava": read_llava,
    "llava_next": read_llava_next,
    "mistral3": read_mistral3,
    "qwen2_5_vl": read_qwen25,
    "qwen2_vl": read_qwen2,
    "qwen3_5": read_qwen35,
    "qwen3_5_moe": read_qwen35,
    "qwen3_vl": read_qwen3,
    "qwen3_vl_moe": read_qwen3,
    "smolvlm": read_idefics3,
}


def with_pictures(config: Mapping[str, Any], text: ModelSpec, fields: Fields) -> ModelSpec:
    """Return a larger model's text part with what reads pictures, where a reader is here."""
    pictures = _read_pictures(config, text, fields)
    if pictures is None or pictures.joins == "none":
        return replace(text, pictures=pictures)

    def joining(branch: Branch) -> Branch:
        if not isinstance(branch, AttentionSpec):
            return branch
        joins = pictures.joins == "all" or branch.window is not None
        return replace(branch, joins_pictures=joins)

    return replace(text.mapped(joining), pictures=pictures)


def _read_pictures(
    config: Mapping[str, Any], text: ModelSpec, fields: Fields
) -> PictureSpec | None:
    """Read how a larger model reads pictures; None where no reader is here, `config.json` describes
    no encoder, or the vocabulary has no placeholder. text: its text part. fields: take what is
    refused.
    """
    read, table = _READERS.get(str(config.get("model_type"))), config.get(_VISION)
    if read is None or table is None:
        return None
    if not isinstance(table, Mapping):
        fields.refuse(f"{_VISION} must be a table, got {table!r}")
        return None
    beside = Fields(table)
    found = read(config, text, beside)
    for problem in beside.problems:
        fields.refuse(f"{_VISION}: {problem}")
    return None if beside.problems else found
