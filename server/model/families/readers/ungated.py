"""Llama whose MLP has no gate: Arcee, Apertus and the dense Nemotron. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import family
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.families.readers import llama
from loraplex.server.model.families.rope import LLAMA, RopeRules, or_usual_table, read_rope
from loraplex.server.model.spec.model_spec import Activation, MlpSpec, ModelSpec, NormSpec

_APERTUS, _NEMOTRON = RopeRules(theta=12e6), RopeRules(partial=0.5)
_ARCEE_EOS, _APERTUS_EOS, _NEMOTRON_EOS = 128001, 2, 3
_XIELU: Activation = "xielu"
# Apertus', where `config.json` says nothing.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_arcee(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    sizes = family.read_sizes(fields, epsilon=1e-5, activation="relu2")
    mlp = family.plain_mlp(sizes, llama.read_biases(fields))
    return _read(fields, generation, sizes, mlp, family.llama_norms(sizes), eos=_ARCEE_EOS)


def read_apertus(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Apertus: q and k are normed in each head; the activation has numbers of its own."""
    fields = or_usual_table(fields, _ROPE)
    has_own = fields.config.get("hidden_act", _XIELU) == _XIELU
    sizes = family.read_sizes(fields, epsilon=1e-5, activation=None if has_own else _XIELU)
    mlp = family.plain_mlp(sizes)
    norms = family.NormPlaces(
        pre_attention=NormSpec("attention_layernorm", sizes.hidden, sizes.epsilon),
        pre_mlp=NormSpec("feedforward_layernorm", sizes.hidden, sizes.epsilon),
    )
    mlp = replace(mlp, activation=_XIELU) if has_own else mlp
    return _read(
        fields, generation, sizes, mlp, norms, eos=_APERTUS_EOS, rules=_APERTUS, qk_norm=True
    )


def read_nemotron(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    """Nemotron 3 and 4, dense: LayerNorm, whose weights are stored less one."""
    sizes = family.read_sizes(fields, epsilon=1e-5, epsilon_key="norm_eps", activation="relu2")

    def norm(path: str) -> NormSpec:
        return NormSpec(path, sizes.hidden, sizes.epsilon, offset=1.0, kind="layer", bias=True)

    norms = family.NormPlaces(norm("input_layernorm"), norm("post_attention_layernorm"))
    mlp = family.plain_mlp(sizes, llama.read_biases(fields))
    model = _read(fields, generation, sizes, mlp, norms, eos=_NEMOTRON_EOS, rules=_NEMOTRON)
    return replace(model, norm=norm(model.norm.path))


def _read(
    fields: Fields,
    generation: Mapping[str, Any],
    sizes: family.ModelSizes,
    mlp: MlpSpec,
    norms: family.NormPlaces,
    *,
    eos: int,
    rules: RopeRules = LLAMA,
    qk_norm: bool = False,
) -> ModelSpec:
    family.refuse_other_attention(fields)
    rope, max_context = read_rope(fields, sizes, rules)
    of = family.attention(sizes, rope, biases=llama.read_biases(fields), qk_norm=qk_norm)
    layers = (family.layer(sizes, of, mlp, norms),) * sizes.layers
    ids = family.read_eos(fields, generation, sizes, default=eos)
    return family.model(fields, sizes, layers, max_context, ids)
