"""The tensors of a decoder within a checkpoint that names them otherwise. No torch.

Savers put the text part of a larger model under prefixes of their own, and a decoder without a head
under none; here all get the names that a model for text would have.
"""

import re
from pathlib import Path

from loraplex.server.model.checkpoint.checkpoint import ModelFile, read_shards, renamed
from loraplex.server.model.spec.model_spec import ModelSpec

_OF_BODY = (
    r"(?:layers|embed_tokens|norm|final_layernorm|embedding_norm|embed_tokens_per_layer|"
    r"per_layer_model_projection|per_layer_projection_norm)\..+"
)
_BODY = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.text_model\.|"
    rf"model\.)(?P<rest>{_OF_BODY})"
)
_BARE = re.compile(_OF_BODY)
_HEAD = re.compile(r"(?:language_model\.)?(?P<head>lm_head\..+)")


def model_shards(folder: Path, model: ModelSpec) -> tuple[ModelFile, ...]:
    """Read the headers of a model's shards, with the names of `ModelSpec.tensors`. Raises
    CheckpointError, also where two tensors would have one name.
    """
    shards = read_shards(folder)
    if not model.is_text_part and model.writes and not model.stored_names:
        return shards

    def name_of(stored: str) -> str:
        if model.is_text_part:  # whose towers may have brought LoRA of their own
            return plain_name(stored).replace(".base_layer.", ".")
        return f"model.{stored}" if not model.writes and _BARE.fullmatch(stored) else stored

    return renamed(shards, name_of, model)


def plain_name(stored: str) -> str:
    """The name of a tensor in a checkpoint of the text part alone; of other parts its own."""
    found = _BODY.fullmatch(stored)
    if found is not None:
        return f"model.{found['rest']}"
    found = _HEAD.fullmatch(stored)
    return stored if found is None else found["head"]
