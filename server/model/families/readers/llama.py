"""Llama, and models whose layers are Llama's but for names, biases, places of norms, or the gate of
the MLP: Seed-OSS, Helium, Ernie 4.5, EXAONE 3, InternLM 2 and 3, dense Hunyuan, GLM 4, Arcee,
Apertus, dense Nemotron, the first Yi and Qwen, XVERSE, Baichuan, ChatGLM. Pure.

Types of `read_yi` and of what follows it have no class in transformers: their code lies on the Hub.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.adapters.base import UNGROUPED, Groups
from loraplex.server.model.families import family
from loraplex.server.model.families.family import Biases, LayerNames, ModelSizes
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.rope import (
    LLAMA,
    RopeRules,
    or_usual_table,
    read_rope,
    rope_table,
)
from loraplex.server.model.spec.model_spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
)

_HELIUM, _ERNIE = RopeRules(theta=1e5, interleaved=True), RopeRules(theta=5e5, interleaved=True)
_EXAONE, _NEMOTRON = RopeRules(theta=5e5), RopeRules(partial=0.5)
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
_GLM, _GLM4V = (RopeRules(partial=part, interleaved=True) for part in (0.5, 1.0))
_GLM_EOS = [151329, 151336, 151338]
# Apertus', where `config.json` says nothing.
_APERTUS = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_XIELU: Activation = "xielu"
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

_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_GLM_NAMES = LayerNames(_QKV, "self_attn.o_proj", ("mlp.gate_up_proj",), "mlp.down_proj")
PHI3_NAMES = _GLM_NAMES._replace(qkv=("self_attn.qkv_proj",))
_BAICHUAN_NAMES = _GLM_NAMES._replace(
    qkv=("self_attn.W_pack",), up=("mlp.gate_proj", "mlp.up_proj")
)
_QWEN_NAMES = LayerNames(
    ("attn.c_attn",), "attn.c_proj", ("mlp.w2", "mlp.w1"), "mlp.c_proj", ("ln_1", "ln_2")
)
_CHATGLM_NAMES = LayerNames(
    ("self_attention.query_key_value",),
    "self_attention.dense",
    ("mlp.dense_h_to_4h",),
    "mlp.dense_4h_to_h",
)
_INTERNLM2_NAMES = LayerNames(
    ("attention.wqkv",),
    "attention.wo",
    ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.w2",
    ("attention_norm", "ffn_norm"),
)


def read(fields: Fields) -> ModelSpec:
    """Llama 1 to 3."""
    return assembled(fields, family.read_sizes(fields), read_biases(fields))


def read_biases(fields: Fields) -> Biases:
    """Read one key for all matrices of attention, and one for the MLP."""
    biases = family.attention_biases(fields)
    return biases._replace(mlp=bool(fields.config.get("mlp_bias", False)))


def assembled(
    fields: Fields,
    sizes: ModelSizes,
    biases: Biases = family.NO_BIASES,
    rules: RopeRules = LLAMA,
    *,
    windows: tuple[int | None, ...] = (),
    qk_norm: bool = False,
    tied: bool = False,
    eos: int | None = 2,
) -> ModelSpec:
    """Make a model whose layers are all Llama's. windows: of each layer; () = none has one.
    qk_norm: q and k are normed in each head. tied, eos: where `config.json` says nothing.
    """
    rope, max_context = read_rope(fields, sizes, rules)
    mlp = family.mlp(sizes, biases)
    of_window = {
        window: family.layer(
            sizes, family.attention(sizes, rope, window, biases, qk_norm=qk_norm), mlp
        )
        for window in {*windows, None}
    }
    layers = [of_window[window] for window in windows or (None,) * sizes.layers]
    return family.model(fields, sizes, layers, max_context, eos=eos, tied=tied)


def with_attention(model: ModelSpec, **changes: Any) -> ModelSpec:
    """Return the model with these changes of the attention of every layer."""
    return model.mapped(lambda of: replace(of, **changes) if isinstance(of, AttentionSpec) else of)


def named(model: ModelSpec, names: LayerNames, groups: Groups = UNGROUPED) -> ModelSpec:
    """Give the modules of all layers these names. groups: of qkv's rows."""
    layers = []
    for layer in model.layers:
        (mlp,) = layer.feed_forwards
        assert isinstance(mlp, MlpSpec)
        branches = family.renamed(layer.attention, mlp, names, groups)
        steps = (
            replace(step, branches=(branch,), pre=step.pre and replace(step.pre, path=path))
            for step, branch, path in zip(layer.steps, branches, names.norms, strict=True)
        )
        layers.append(LayerSpec(tuple(steps)))
    return replace(model, layers=tuple(layers))


def read_seed_oss(fields: Fields) -> ModelSpec:
    """Seed-OSS: the biases of q, k and v, of o and of the MLP are keys of their own."""
    sizes = family.read_sizes(fields, kv_heads=8, head_dim=128)
    biases = Biases(
        qkv=bool(fields.config.get("attention_bias", True)),
        o=bool(fields.config.get("attention_out_bias", False)),
        mlp=bool(fields.config.get("mlp_bias", False)),
    )
    return assembled(fields, sizes, biases)


def read_helium(fields: Fields) -> ModelSpec:
    """Read Helium's configuration. Neighbouring features turn together."""
    sizes = family.read_sizes(fields, kv_heads=20, head_dim=128, epsilon=1e-8)
    family.refuse_other_head_dim(fields, sizes)
    return assembled(fields, sizes, read_biases(fields)._replace(o=False), _HELIUM)


def read_ernie(fields: Fields) -> ModelSpec:
    """Ernie 4.5, without experts: neighbouring features turn together."""
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=1e-5)
    bias = bool(fields.config.get("use_bias", False))
    return assembled(fields, sizes, Biases(bias, bias, bias), _ERNIE, tied=True)


def read_exaone(fields: Fields) -> ModelSpec:
    """EXAONE 3 and 3.5."""
    fields = _respelled(fields, _EXAONE_KEYS)
    sizes = family.read_sizes(fields, kv_heads=8, epsilon=1e-5)
    model = assembled(fields, sizes, read_biases(fields), _EXAONE, eos=361)
    return replace(model, stored_names=_EXAONE_TENSORS)


def read_internlm3(fields: Fields) -> ModelSpec:
    """InternLM 3: the bias of o is that of the MLP."""
    fields = _respelled(fields, {"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=1e-5)
    biases = read_biases(fields)
    return assembled(fields, sizes, biases._replace(o=biases.mlp))


def read_hunyuan(fields: Fields) -> ModelSpec:
    """Hunyuan, dense: q and k are normed in each head, behind the rotation."""
    fields.only("use_qk_norm", True)
    fields.only("use_cla", False)
    fields.only("mlp_bias", False)
    sizes = family.read_sizes(fields, epsilon=1e-5)
    q_norm, k_norm = (
        NormSpec(f"self_attn.{name}_layernorm", sizes.head_dim, sizes.epsilon)
        for name in ("query", "key")
    )
    model = assembled(_stretched(fields, sizes), sizes, read_biases(fields))
    return with_attention(model, q_norm=q_norm, k_norm=k_norm, norms_rotated=True)


def _stretched(fields: Fields, sizes: ModelSizes) -> Fields:
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


def read_glm(fields: Fields) -> ModelSpec:
    """Read the first GLM 4, whose norms lie in Llama's places. Neighbouring features of the first
    half of each head turn together; gate and up are one module.
    """
    return _glm(fields, _GLM)


def read_glm4(fields: Fields) -> ModelSpec:
    """GLM 4 0414: norms behind attention and MLP, too."""
    return _glm(fields, _GLM, is_normed_behind=True)


def read_glm4v(fields: Fields) -> ModelSpec:
    """Read the text part of GLM 4.1V and 4.6V: q, k and v always have a bias."""
    fields.only("attention_bias", True)
    head_dim = fields.positive("hidden_size") // fields.positive("num_attention_heads")
    said = fields.config.get("head_dim") or head_dim
    fields = fields.changed(attention_bias=True, head_dim=said)
    return _glm(fields, _GLM4V, is_normed_behind=True)


def _glm(fields: Fields, rules: RopeRules, *, is_normed_behind: bool = False) -> ModelSpec:
    sizes = family.read_sizes(fields, kv_heads=2, head_dim=128, epsilon=1.5625e-07)
    biases = Biases(qkv=bool(fields.config.get("attention_bias", True)))
    if fields.config.get("eos_token_id") is None:
        fields = fields.changed(eos_token_id=_GLM_EOS)
    model = named(assembled(fields, sizes, biases, rules), _GLM_NAMES)
    if not is_normed_behind:
        return model
    norms = family.llama_norms(sizes)._replace(
        post_attention=family.norm("post_self_attn_layernorm", sizes),
        post_mlp=family.norm("post_mlp_layernorm", sizes),
    )
    return family.with_norms(model, norms)


def read_arcee(fields: Fields) -> ModelSpec:
    """Arcee: an MLP without gate."""
    sizes = family.read_sizes(fields, epsilon=1e-5, activation="relu2")
    model = assembled(fields, sizes, read_biases(fields), eos=128001)
    return _ungated(model, family.plain_mlp(sizes, read_biases(fields)))


def read_apertus(fields: Fields) -> ModelSpec:
    """Apertus: q and k are normed in each head; the activation has numbers of its own."""
    fields = or_usual_table(fields, _APERTUS)
    has_own = fields.config.get("hidden_act", _XIELU) == _XIELU
    sizes = family.read_sizes(fields, epsilon=1e-5, activation=None if has_own else _XIELU)
    rules = RopeRules(theta=12e6)
    model = assembled(fields, sizes, read_biases(fields), rules, qk_norm=True)
    mlp = family.plain_mlp(sizes)
    model = _ungated(model, replace(mlp, activation=_XIELU) if has_own else mlp)
    norms = (family.norm(f"{name}_layernorm", sizes) for name in ("attention", "feedforward"))
    return family.with_norms(model, family.NormPlaces(*norms))


def read_nemotron(fields: Fields) -> ModelSpec:
    """Nemotron 3 and 4, dense: LayerNorm, whose weights are stored less one."""
    sizes = family.read_sizes(fields, epsilon=1e-5, epsilon_key="norm_eps", activation="relu2")
    model = assembled(fields, sizes, read_biases(fields), _NEMOTRON, eos=3)
    model = _ungated(model, family.plain_mlp(sizes, read_biases(fields)))
    norms = (replace(norm, offset=1.0) for norm in family.layer_norms(sizes)[:2] if norm)
    return family.with_norms(model, family.NormPlaces(*norms))


def _ungated(model: ModelSpec, mlp: MlpSpec) -> ModelSpec:
    return model.mapped(lambda branch: mlp if isinstance(branch, MlpSpec) else branch)


def read_yi(fields: Fields) -> ModelSpec:
    """The first Yi, whose norms have names of their own."""
    model = assembled(fields, family.read_sizes(fields))
    return replace(model, stored_names=_YI)


def read_xverse(fields: Fields) -> ModelSpec:
    """XVERSE without experts."""
    fields.only("num_experts", None)
    return assembled(fields, family.read_sizes(fields))


def read_internlm2(fields: Fields) -> ModelSpec:
    """InternLM 2 and 2.5: q, k and v are one module, in groups of a head of keys."""
    sizes = family.read_sizes(fields)
    bias = bool(fields.config.get("bias", True))
    biases = Biases(qkv=bias, o=bias)
    model = assembled(fields, sizes, biases, eos=2)
    model = named(model, _INTERNLM2_NAMES, Groups(sizes.kv_heads))
    return replace(model, stored_names=_INTERNLM2)


def read_baichuan(fields: Fields) -> ModelSpec:
    """Baichuan 7B. The second one norms the rows of its head."""
    if fields.config.get("max_position_embeddings") is None:
        fields.refuse("biases of scores by distance (ALiBi), as in Baichuan 13B, are not served")
        fields = fields.changed(max_position_embeddings=1)
    model = assembled(fields, family.read_sizes(fields))
    is_second = fields.config.get("architectures") == ["BaichuanForCausalLM"]
    head = replace(model.head, is_normed=is_second)
    return replace(named(model, _BAICHUAN_NAMES), head=head)


def read_qwen(fields: Fields) -> ModelSpec:
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
    biases = Biases(qkv=True, o=biased, mlp=biased)
    model = assembled(fields, sizes, biases, rules)
    return replace(named(model, _QWEN_NAMES), stored_names=OF_GPT2)


def read_chatglm(fields: Fields) -> ModelSpec:
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
    rules = RopeRules(theta=LLAMA.theta * ratio, partial=0.5, interleaved=True)
    biased = bool(config.get("add_bias_linear", False))
    qkv = biased or bool(config.get("add_qkv_bias", False))
    biases = Biases(qkv=qkv, o=biased, mlp=biased)
    model = assembled(fields, sizes, biases, rules)
    return replace(named(model, _CHATGLM_NAMES), stored_names=_CHATGLM)
