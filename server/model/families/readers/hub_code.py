"""Types that transformers has no class for: their code lies on the Hub, and computes what a served
relative does, under names of its own. Pure.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from loraplex.adapters.sharding import UNGROUPED, Groups
from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama, renamed
from loraplex.server.model.families.rope import LLAMA, RopeRules
from loraplex.server.model.spec.model_spec import MlpSpec, ModelSpec

_YI = ((r"\.ln1\.", ".input_layernorm."), (r"\.ln2\.", ".post_attention_layernorm."))
_CHATGLM = (
    (r"^transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
    (r"^transformer\.encoder\.layers\.", "model.layers."),
    (r"^transformer\.encoder\.final_layernorm\.", "model.norm."),
    (r"^transformer\.output_layer\.", "lm_head."),
    (r"^transformer\.rotary_pos_emb\.", "model.rotary_emb."),
)
_INTERNLM2 = ((r"^model\.tok_embeddings\.", "model.embed_tokens."), (r"^output\.", "lm_head."))
# What ChatGLM's code can compute otherwise, and no later version does.
_CHATGLM_FIXED: dict[str, Any] = {
    "position_encoding_2d": False,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "rmsnorm": True,
    "original_rope": True,
    "pre_seq_len": None,
}


class _Names(NamedTuple):
    """Names of a layer's modules. qkv, gate_up: one module where one name stands."""

    qkv: str
    o: str
    gate_up: tuple[str, ...]
    down: str
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")


_BAICHUAN_NAMES = _Names(
    "self_attn.W_pack", "self_attn.o_proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
)
_QWEN_NAMES = _Names(
    "attn.c_attn", "attn.c_proj", ("mlp.w2", "mlp.w1"), "mlp.c_proj", ("ln_1", "ln_2")
)
_CHATGLM_NAMES = _Names(
    qkv="self_attention.query_key_value",
    o="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_INTERNLM2_NAMES = _Names(
    "attention.wqkv",
    "attention.wo",
    ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.w2",
    ("attention_norm", "ffn_norm"),
)


def read_yi(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """The first Yi, whose norms have names of their own."""
    model = llama.assembled(fields, generation, family.read_sizes(fields), family.NO_BIASES)
    return replace(model, stored_names=_YI)


def read_xverse(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """XVERSE without experts."""
    fields.only("num_experts", None)
    return llama.assembled(fields, generation, family.read_sizes(fields), family.NO_BIASES)


def read_internlm2(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """InternLM 2 and 2.5: q, k and v are one module, in groups of a head of keys."""
    sizes = family.read_sizes(fields)
    bias = bool(fields.config.get("bias", True))
    biases = family.Biases(qkv=bias, o=bias)
    model = llama.assembled(fields, generation, sizes, biases, eos=2)
    named = _named(model, _INTERNLM2_NAMES, Groups(sizes.kv_heads))
    return replace(named, stored_names=_INTERNLM2)


def read_baichuan(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Baichuan 7B. The second one norms the rows of its head."""
    if fields.config.get("max_position_embeddings") is None:
        fields.refuse("biases of scores by distance (ALiBi), as in Baichuan 13B, are not served")
        fields = fields.changed(max_position_embeddings=1)
    model = llama.assembled(fields, generation, family.read_sizes(fields), family.NO_BIASES)
    is_second = fields.config.get("architectures") == ["BaichuanForCausalLM"]
    head = replace(model.head, is_normed=is_second)
    return replace(_named(model, _BAICHUAN_NAMES), head=head)


def read_qwen(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """The first Qwen. Scaling by the length of a context begins behind `seq_length`."""
    config = fields.config
    fields.only("rotary_pct", 1.0)
    fields.only("scale_attn_weights", True)
    length = fields.positive("seq_length", config.get("max_position_embeddings"))
    if not (config.get("use_dynamic_ntk") or config.get("use_logn_attn")):
        length = max(length, fields.positive("max_position_embeddings", length))
    fields = fields.changed(
        max_position_embeddings=length,
        num_key_value_heads=config.get("num_attention_heads"),
        head_dim=config.get("kv_channels"),
        intermediate_size=fields.positive("intermediate_size") // 2,
    )
    sizes = family.read_sizes(fields, epsilon_key="layer_norm_epsilon")
    rules = RopeRules(theta=fields.number(config, "rotary_emb_base", LLAMA.theta))
    biased = not config.get("no_bias", True)
    biases = family.Biases(qkv=True, o=biased, mlp=biased)
    model = llama.assembled(fields, generation, sizes, biases, rules)
    return replace(_named(model, _QWEN_NAMES), stored_names=renamed.OF_GPT2)


def read_chatglm(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """ChatGLM 2 and 3, and GLM-4 9B of the Hub's code: GLM's maths."""
    config = fields.config
    for key, usual in _CHATGLM_FIXED.items():
        fields.only(key, usual)
    groups = config.get("multi_query_group_num") if config.get("multi_query_attention") else None
    fields = fields.changed(
        vocab_size=config.get("padded_vocab_size"),
        intermediate_size=config.get("ffn_hidden_size"),
        num_hidden_layers=config.get("num_layers"),
        num_key_value_heads=groups,
        head_dim=config.get("kv_channels"),
        max_position_embeddings=config.get("seq_length"),
    )
    sizes = family.read_sizes(fields, epsilon=1e-5, epsilon_key="layernorm_epsilon")
    ratio = fields.number(config, "rope_ratio", 1.0)
    rules = RopeRules(theta=LLAMA.theta * ratio, partial=0.5)
    biased = bool(config.get("add_bias_linear", False))
    qkv = biased or bool(config.get("add_qkv_bias", False))
    biases = family.Biases(qkv=qkv, o=biased, mlp=biased)
    model = llama.assembled(fields, generation, sizes, biases, rules, interleaved=True)
    return replace(_named(model, _CHATGLM_NAMES), stored_names=_CHATGLM)


def _named(model: ModelSpec, names: _Names, groups: Groups = UNGROUPED) -> ModelSpec:
    """Give the modules of all layers, which are the same, these names. groups: of qkv's rows."""
    layer = model.layers[0]
    (attend, feed), of = layer.steps, layer.attention
    qkv = family.fused(of.qkv, names.qkv, groups)
    of = replace(of, qkv=qkv, o=family.with_paths(of.o, names.o))
    (mlp,) = layer.feed_forwards
    assert isinstance(mlp, MlpSpec)
    if len(names.gate_up) == 1:
        gate_up = family.fused(mlp.gate_up, names.gate_up[0])
    else:
        gate_up = family.with_paths(mlp.gate_up, *names.gate_up)
    mlp = replace(mlp, gate_up=gate_up, down=family.with_paths(mlp.down, names.down))
    pre = [
        None if step.pre is None else replace(step.pre, path=path)
        for step, path in zip(layer.steps, names.norms, strict=True)
    ]
    steps = replace(attend, branches=(of,), pre=pre[0]), replace(feed, branches=(mlp,), pre=pre[1])
    return replace(model, layers=(replace(layer, steps=steps),) * model.num_layers)
