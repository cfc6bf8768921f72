"""Models whose scores fall with distance (ALiBi): BLOOM and MPT. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.sharding import Groups
from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import gpt
from loraplex.server.model.spec.model_spec import ModelSpec

_BLOOM_EOS = 2
_BLOOM_NORM = "word_embeddings_layernorm"
_BLOOM_TENSORS = (
    (rf"^(?:transformer\.)?{_BLOOM_NORM}\.", f"model.{_BLOOM_NORM}."),
    *gpt.FALCON_TENSORS,
)
_BLOOM_KEYS = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_MPT_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
_MPT_NAMES = family.LayerNames(("attn.Wqkv",), "attn.out_proj", "ffn.up_proj", "ffn.down_proj")
# What MPT may say, where another value would change it, and what its attention.
_MPT_USUAL: dict[str, object] = {
    "no_bias": True,
    "expansion_ratio": 4,
    "logit_scale": None,
    "norm_type": "low_precision_layernorm",
}
_MPT_ATTENTION: dict[str, object] = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
    "rope": False,
}


def read_bloom(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """BLOOM: a norm of the embedding; q, k and v are one module, head by head."""
    fields.only("apply_residual_connection_post_layernorm", False)
    fields = gpt.of_own_names(fields, _BLOOM_KEYS)
    hidden = fields.config.get("n_embed") or fields.config.get("hidden_size")
    fields = _four_times(fields, hidden, "n_inner", "gelu_pytorch_tanh", "seq_length")
    sizes = gpt.read_sizes(fields, None, "layer_norm_epsilon")
    biases = family.Biases(qkv=True, o=True, mlp=True)
    of = family.attention(sizes, None, biases=biases)
    of = replace(of, slopes=family.alibi_slopes(sizes.heads))
    of, mlp = family.branches_of(sizes, of, gpt.FALCON_NAMES, biases, Groups(sizes.heads))
    layers = [family.layer(sizes, of, mlp, family.layer_norms(sizes))] * sizes.layers
    fields = family.tied_where_unsaid(fields)
    model = family.layer_normed(fields, generation, sizes, layers, sizes.positions, _BLOOM_EOS)
    norm = family.layer_norm(f"model.{_BLOOM_NORM}", sizes)
    embedding = replace(model.embedding, norm=norm)
    return replace(model, embedding=embedding, stored_names=_BLOOM_TENSORS)


def read_mpt(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """MPT: neither matrices nor norms have a bias; q, k and v may be clipped."""
    for key, usual in _MPT_USUAL.items():
        fields.only(key, usual)
    said = fields.table(fields.config, "attn_config")
    inner = fields.changed(**said)
    for key, usual in _MPT_ATTENTION.items():
        inner.only(key, usual)
    fields = gpt.of_own_names(fields, _MPT_KEYS)
    hidden = fields.config.get("hidden_size")
    fields = _four_times(fields, hidden, "ffn_hidden_size", "gelu", "max_seq_len")
    sizes = gpt.read_sizes(fields, None, "layer_norm_epsilon")
    scale = None
    if said.get("softmax_scale") is not None:
        scale = fields.number(said, "softmax_scale", None)
    of = family.attention(sizes, None, scale=scale)
    clip = fields.number(said, "clip_qkv", None) if said.get("clip_qkv") else 0.0
    of = replace(of, clip=clip, slopes=family.alibi_slopes(sizes.heads))
    of, mlp = family.branches_of(sizes, of, _MPT_NAMES, family.NO_BIASES)
    norms = family.layer_norms(sizes, ("norm_1", "norm_2"), bias=False)
    fields = family.tied_where_unsaid(fields)
    layers = [family.layer(sizes, of, mlp, norms)] * sizes.layers
    model = family.layer_normed(fields, generation, sizes, layers, sizes.positions, None)
    last = family.layer_norm(model.norm.path, sizes, bias=False)
    return replace(model, norm=last, stored_names=gpt.MPT_TENSORS)


def _four_times(
    fields: Fields, hidden: object, inner: str, activation: str, positions: str
) -> Fields:
    """Return fields of an MLP that is four times as wide as the model. inner: a key that may say
    so. positions: the key of a context's tokens."""
    width = 4 * hidden if isinstance(hidden, int) else hidden
    fields.only(inner, width)
    return fields.changed(
        hidden_size=hidden,
        intermediate_size=width,
        hidden_act=activation,
        max_position_embeddings=fields.config.get(positions),
    )
