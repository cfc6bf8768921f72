"""DBRX: experts in every layer, whose matrices are a tensor for each product of all. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import experts, family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import gpt
from loraplex.server.model.families.rope import read_rope, rope_table
from loraplex.server.model.spec.linear_spec import ExpertStorage, Part
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec, RouterRule

_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
_ATTENTION, _EXPERTS = "norm_attn_norm.attn", "ffn.experts.mlp"
_NAMES = experts.ExpertNames("ffn.router.layer", _EXPERTS, gate="w1", up="v1", down="w2")
_NORMS = "norm_attn_norm.norm_1", "norm_attn_norm.norm_2"
_ROWS = ExpertStorage(_EXPERTS, "rows")
_TRANSPOSED = ExpertStorage(_EXPERTS, "rows", transposed=True)


def read(fields: Fields) -> ModelSpec:
    fields.only("tie_word_embeddings", False)
    said = fields.table(fields.config, "attn_config")
    feed = fields.table(fields.config, "ffn_config")
    fields = gpt.of_own_names(fields, _KEYS)
    fields = fields.changed(
        intermediate_size=feed.get("ffn_hidden_size", 3584),
        num_experts=feed.get("moe_num_experts", 4),
        num_local_experts=None,
        num_experts_per_tok=feed.get("moe_top_k", 1),
        hidden_act=fields.table(feed, "ffn_act_fn").get("name", "silu"),
        rope_theta=_theta(fields, said),
    )
    experts.refuse_other_activation(fields)
    sizes = gpt.read_sizes(fields, said.get("kv_n_heads", 1), "")._replace(epsilon=1e-5)
    rope, max_context = read_rope(fields, sizes)
    of = family.attention(sizes, rope)
    clip = 0.0 if said.get("clip_qkv") is None else fields.number(said, "clip_qkv", None)
    qkv = family.fused(of.qkv, f"{_ATTENTION}.Wqkv")
    of = replace(of, qkv=qkv, o=family.with_paths(of.o, f"{_ATTENTION}.out_proj"), clip=clip)
    norms = family.layer_norms(sizes, _NORMS, bias=False)
    layer = family.layer(sizes, of, _read_experts(fields, feed, sizes), norms)
    return family.model(fields, sizes, layer, max_context, stored_names=gpt.MPT_TENSORS)


def _theta(fields: Fields, said: Mapping[str, Any]) -> object:
    """Read the base of the rotation, which `attn_config` may say: transformers 5 does not read
    that, so it must not contradict the table beside it."""
    theta, table = said.get("rope_theta"), rope_table(fields)
    other = table.get("rope_theta", fields.config.get("rope_theta"))
    if None not in (theta, other) and theta != other:
        fields.refuse(f"attn_config: rope_theta is {theta!r}, and {other!r} beside it")
    return other if theta is None else theta


def _read_experts(fields: Fields, feed: Mapping[str, Any], sizes: family.ModelSizes) -> MoeSpec:
    power = feed.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1.0):
        fields.refuse(f"ffn_config: moe_normalize_expert_weights must be 1, got {power!r}")
    rule: RouterRule = "softmax_top_k" if power is None else "softmax_top_k_normed"
    counts = experts.read_counts(fields, default=4, default_of_token=1)
    moe = experts.moe(sizes.hidden, sizes.inner, counts, _NAMES, rule)
    gate, up = (Part(f"{_EXPERTS}.{name}", sizes.inner) for name in ("w1", "v1"))
    down = Part(f"{_EXPERTS}.w2", sizes.hidden)
    return replace(
        moe,
        gate_up=replace(moe.gate_up, parts=(gate, up), stored=_ROWS),
        down=replace(moe.down, parts=(down,), stored=_TRANSPOSED),
    )
