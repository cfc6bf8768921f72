"""Llama under other names of keys or tensors, and with other usual values. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama
from loraplex.server.model.families.rope import LLAMA, RopeRules, rope_table
from loraplex.server.model.spec.model_spec import ModelSpec, NormSpec

_EXAONE = RopeRules(theta=5e5)
_EXAONE_KEYS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
# Of a body that GPT-2's names hold, alone or with a head.
OF_GPT2 = (
    (r"^(?:transformer\.)?wte\.", "model.embed_tokens."),
    (r"^(?:transformer\.)?h\.", "model.layers."),
    (r"^(?:transformer\.)?ln_f\.", "model.norm."),
)
_EXAONE_TENSORS = (
    *OF_GPT2,
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)


def read_exaone(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """EXAONE 3 and 3.5."""
    fields = _respelled(fields, _EXAONE_KEYS)
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    biases = llama.read_biases(fields)
    model = llama.assembled(fields, generation, sizes, biases, _EXAONE, eos=361)
    return replace(model, stored_names=_EXAONE_TENSORS)


def read_internlm3(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """InternLM 3: the bias of o is that of the MLP."""
    fields = _respelled(fields, {"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=1e-5)
    biases = llama.read_biases(fields)
    return llama.assembled(fields, generation, sizes, biases._replace(o=biases.mlp))


def read_hunyuan(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Hunyuan, dense: q and k are normed in each head, behind the rotation."""
    fields.only("use_qk_norm", True)
    fields.only("use_cla", False)
    fields.only("mlp_bias", False)
    sizes = family.read_sizes(fields, epsilon=1e-5)
    model = llama.assembled(_stretched(fields, sizes), generation, sizes, llama.read_biases(fields))
    norms = (
        NormSpec(f"self_attn.{name}_layernorm", sizes.head_dim, sizes.epsilon)
        for name in ("query", "key")
    )
    attend, feed = model.layers[0].steps
    of = replace(
        model.layers[0].attention, q_norm=next(norms), k_norm=next(norms), norms_rotated=True
    )
    layer = replace(model.layers[0], steps=(replace(attend, branches=(of,)), feed))
    return replace(model, layers=(layer,) * sizes.layers)


def _stretched(fields: Fields, sizes: family.ModelSizes) -> Fields:
    """Return the base of the rotation as a fixed `alpha` stretches it: "dynamic" is its name."""
    table = rope_table(fields)
    if not table.get("alpha") or table.get("rope_type", table.get("type")) != "dynamic":
        return fields
    theta = fields.number(table, "rope_theta", fields.config.get("rope_theta", LLAMA.theta))
    theta *= fields.number(table, "alpha", None) ** (sizes.head_dim / max(sizes.head_dim - 2, 1))
    return fields.changed(rope_scaling=None, rope_parameters={"rope_theta": theta})


def _respelled(fields: Fields, names: Mapping[str, str]) -> Fields:
    """Return fields with the usual names of keys, where these are not there."""
    config = fields.config
    found = {usual: config[own] for own, usual in names.items() if own in config}
    return fields.changed(**{key: value for key, value in found.items() if key not in config})
