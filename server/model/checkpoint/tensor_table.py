"""The tensors that a checkpoint must hold and may hold, and the check of them. No torch."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from loraplex.adapters.peft.tensor_names import is_of_images
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.server.model.checkpoint.checkpoint import (
    CheckpointError,
    ModelFile,
    read_config,
    stored_tensors,
    tables,
)
from loraplex.server.model.checkpoint.layer_forms import as_stored
from loraplex.server.model.checkpoint.stored_forms import expected_tensors, stored_forms
from loraplex.server.model.checkpoint.text_part import model_shards
from loraplex.server.model.quantisation.forms import FLOATS, UINT8, TensorForm
from loraplex.server.model.spec.linear_spec import MXFP4_TENSORS
from loraplex.server.model.spec.model_spec import ModelSpec

_MAX_LISTED = 8
_LAYER = re.compile(r"model\.layers\.(?P<layer>[0-9]{1,6})\.(?P<rest>.+)")
# What a checkpoint carries along and transformers leaves out when it loads the model.
_LEFT_OUT = {
    # Derived from the configuration.
    "rotary tables": re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"),
    "attention masks": re.compile(r".*\.(masked_bias|(attn|attention)\.bias|causal_mask)"),
    # TRL's, for training by reinforcement.
    "value head": re.compile(r"v_head\..+"),
    "multi-token prediction": re.compile(r"(model\.)?mtp(_[a-z_]+)?\..+"),
}
# Of keys, values, queries and weights of attention in FP8: they may be there.
_SCALES = re.compile(
    r"model\.layers\.[0-9]+\.self_attn\.(([kvq]|prob)_scale|(k|v)_proj\.(output|[kv])_scale)"
)
# A part of a larger model whose text part is served.
_IMAGES = "the part for images"
_PREDICTION = "multi-token prediction"
# What only a layer beyond the last has, whose work is to predict further tokens.
_OF_PREDICTION = re.compile(
    r"(eh_proj|enorm|hnorm|shared_head|embed_tokens|input_proj|token_layernorm|hidden_layernorm|"
    r"final_layernorm|mtp[a-z_]*)\..+"
)
_QUANTISED = re.compile(
    r".*\.(qweight|qzeros|weight_packed|weight_scale|weight_scale_inv|absmax|quant_map|SCB)"
)


def check_folder(folder: Path, *, with_tensors: bool = True) -> ModelSpec:
    """The configuration of a model's folder, once it fits the weights' headers.

    Raises CheckpointError with what matters most first.
    """
    model = read_config(folder)
    if with_tensors:
        check_tensors(folder, model_shards(folder, model), model)
    return model


def check_tensors(folder: Path, shards: Sequence[ModelFile], model: ModelSpec) -> tuple[str, ...]:
    """Names of stored tensors that are left out, since they change no token.

    Raises CheckpointError with everything that is missing, unexpected or of another shape.
    """
    stored = stored_tensors(shards)
    _refuse_quantised(folder, stored, model)
    expected = _expected(as_stored(model, stored), stored)
    # Of a head that is tied, or that nobody asks.
    ignored = {model.head.tensor} if model.head.tied else set()
    ignored |= set(filter(_SCALES.fullmatch, stored))
    ignored |= set(filter(re.compile(model.unread).fullmatch, stored))
    others = [name for name in stored if name not in expected and name not in ignored]
    beyond = _predicting_layers(others, model)
    left_out = tuple(
        name
        for name in others
        if _kind(name, beyond) is not None or (model.is_text_part and is_of_images(name))
    )
    unfit = {
        "missing": [
            name for name, tensor in expected.items() if name not in stored and not tensor.optional
        ],
        "unexpected": [name for name in others if name not in left_out],
        "wrong": [
            f"{name} (expected {_shown(tensor)}, got {stored[name].dtype}"
            f" {list(stored[name].shape)})"
            for name, tensor in expected.items()
            if name in stored and not tensor.fits(stored[name])
        ],
    }
    problems = [f"{len(n)} {kind}: {_listed(n)}" for kind, n in unfit.items() if n]
    if problems:
        raise CheckpointError(f"{folder}: tensors do not fit config.json: {'; '.join(problems)}")
    return left_out


def _refuse_quantised(folder: Path, stored: Mapping[str, TensorInfo], model: ModelSpec) -> None:
    if model.quantisation is not None:
        return
    quantised = next(filter(_QUANTISED.fullmatch, stored), None)
    if quantised is not None:
        raise CheckpointError(
            f"{folder}: the weights are quantised ({quantised}), and config.json does not say how"
            " (quantization_config)"
        )


def _expected(model: ModelSpec, stored: Mapping[str, TensorInfo]) -> dict[str, TensorForm]:
    expected = expected_tensors(model, stored_forms(model, stored))
    expected[tables(stored, model)[0]] = expected.pop(model.embedding.tensor)
    for name, tensor in expected.items():
        if name.endswith(MXFP4_TENSORS):
            expected[name] = tensor._replace(dtypes=UINT8)
    return expected


def _shown(tensor: TensorForm) -> str:
    shapes = " or ".join(str(list(shape)) for shape in tensor.shapes)
    if tensor.dtypes == FLOATS:
        return shapes
    return f"{' or '.join(sorted(tensor.dtypes))} {shapes}".rstrip()


def kinds(left_out: Collection[str]) -> tuple[int, str]:
    """How many, and what they are, for people."""
    counts = Counter(
        _IMAGES if is_of_images(name) else _kind(name, frozenset()) or _PREDICTION
        for name in left_out
    )
    return len(left_out), ", ".join(f"{kind} ({count})" for kind, count in counts.items())


def _kind(name: str, beyond: Collection[int]) -> str | None:
    """The kind of a tensor that is left out; None for any other tensor."""
    found = _LAYER.fullmatch(name)
    if found is not None and int(found["layer"]) in beyond:
        return _PREDICTION
    return next((kind for kind, names in _LEFT_OUT.items() if names.fullmatch(name)), None)


def _predicting_layers(names: Sequence[str], model: ModelSpec) -> frozenset[int]:
    """Layers beyond the last that predict further tokens, as config.json or their tensors say.

    Others are those of a model whose config.json leaves layers out.
    """
    layers = [found for found in map(_LAYER.fullmatch, names) if found is not None]
    beyond = {int(found["layer"]) for found in layers if _OF_PREDICTION.fullmatch(found["rest"])}
    declared = range(model.num_layers, model.num_layers + model.extra_layers)
    return frozenset(layer for layer in beyond if layer >= model.num_layers).union(declared)


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(names[:_MAX_LISTED])}{more}"
