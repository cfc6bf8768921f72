"""The tensors of an encoder of pictures within a checkpoint of a larger model. No torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from loraplex.server.model.checkpoint.checkpoint import ModelFile, read_shards, renamed
from loraplex.server.model.spec.model_spec import ModelSpec

_TOWER = re.compile(
    r"(?:model\.)?(?:(?:visual|vision_tower)\.(?:vision_model\.)?|vision_model\."
    r"|(?=(?:multi_modal_projector|embed_vision|vision_embedder|connector)\.|image_newline))(?P<rest>.+)"
)
# Parameters without a module of their own, which a ModelSpec has as weights of one.
_BARE = re.compile(
    r"(?:mm_input_projection|position_embedding_table|position_embeddings|lambda_[12]"
    r"|vision_embedder\.pos_embedding)$"
)
_BLOCKS = re.compile(r"(?:blocks|(?:encoder|transformer)\.layers?)\.(?=[0-9])")


def tower_name(stored: str) -> str | None:
    """The name of a tensor in the tower's ModelSpec; None for those of other parts."""
    found = _TOWER.fullmatch(stored)
    if found is None:
        return None
    rest = _BLOCKS.sub("model.layers.", found["rest"], count=1)
    # LoRA of the checkpoint's own may have been there, and Gemma wraps products.
    rest = rest.replace(".base_layer.", ".").replace(".linear.", ".")
    return _BARE.sub(r"\g<0>.weight", rest.replace("projection_weight", "projection"))


def tower_shards(folder: Path, tower: ModelSpec) -> tuple[ModelFile, ...]:
    """Read the headers of a model's shards: the tensors of the tower, with the names of its
    `ModelSpec.tensors`. Raises CheckpointError, also where two tensors would have one name.
    """
    return renamed(read_shards(folder), tower_name, tower)


def has_tower(shards: Sequence[ModelFile]) -> bool:
    """Whether a checkpoint holds any tensor of a tower. shards: with the names of the files."""
    return any(tower_name(tensor.name) for shard in shards for tensor in shard.tensors.values())
