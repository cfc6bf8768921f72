"""ModernBERT: rotation, gated MLPs, norms before branches, and windows in most layers. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from loraplex.server.model.families import encoders, family
from loraplex.server.model.families.family import FULL, WINDOWED
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.linear_spec import LinearSpec, Part
from loraplex.server.model.spec.model_spec import (
    EmbeddingSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    ScoreSpec,
)

_POOLINGS: dict[str, encoders.Pooling] = {"cls": "first", "mean": "mean"}
_THETAS = {FULL: ("global_rope_theta", 160_000.0), WINDOWED: ("local_rope_theta", 10_000.0)}
_NAMES = (
    *encoders.stored_names("model", "layers"),
    (r"^model\.embeddings\.tok_embeddings\.", f"{encoders.EMBED}."),
    (r"^model\.embeddings\.norm\.", f"{encoders.NORM}."),
    (r"^model\.final_norm\.", "model.norm."),
)


def read(fields: Fields, generation: Mapping[str, Any]) -> ModelSpec:
    config = fields.config
    fields = fields.changed(hidden_act=config.get("hidden_activation", "gelu"))
    fields.only("rope_scaling", None)
    sizes = encoders.read_sizes(fields, 8192, epsilon=1e-5, epsilon_key="norm_eps")
    has_bias = bool(config.get("norm_bias", False))

    def norm(path: str) -> NormSpec:
        return family.layer_norm(path, sizes, bias=has_bias)

    every = fields.positive("global_attn_every_n_layers", 3)
    windowed = family.read_windowed(fields, sizes, lambda n: n % every != 0)
    layers = [_layer(fields, sizes, norm, n, windowed=is_one) for n, is_one in enumerate(windowed)]
    embedding = EmbeddingSpec(encoders.EMBED, sizes.vocab, sizes.hidden, norm=norm(encoders.NORM))
    model = encoders.encoder(fields, sizes, embedding, layers, _scores(fields, sizes, norm), _NAMES)
    return replace(model, norm=norm("model.norm"))


def _layer(
    fields: Fields,
    sizes: family.ModelSizes,
    norm: encoders.MakeNorm,
    number: int,
    *,
    windowed: bool,
) -> LayerSpec:
    bias, window = bool(fields.config.get("attention_bias", False)), None
    if windowed:
        window = fields.positive("local_attention", 128) // 2 + 1
    biases = family.Biases(bias, bias, bool(fields.config.get("mlp_bias", False)))
    of = family.attention(sizes, _rope(fields, WINDOWED if windowed else FULL), window, biases)
    mlp = family.mlp(sizes, biases)
    return family.layer(
        sizes,
        replace(of, qkv=family.fused(of.qkv, "attn.Wqkv"), o=family.with_paths(of.o, "attn.Wo")),
        replace(
            mlp,
            gate_up=family.fused(mlp.gate_up, "mlp.Wi"),
            down=family.with_paths(mlp.down, "mlp.Wo"),
        ),
        family.NormPlaces(norm("attn_norm") if number else None, norm("mlp_norm")),
    )


def _rope(fields: Fields, kind: str) -> RopeSpec:
    key, usual = _THETAS[kind]
    table = fields.table(fields.table(fields.config, "rope_parameters"), kind)
    if table.get("rope_type", "default") != "default":
        fields.refuse(f"rope_parameters: only default is served, got {table['rope_type']!r}")
    usual = fields.number(fields.config, key, usual)
    return RopeSpec("default", fields.number(table, "rope_theta", usual))


def _scores(
    fields: Fields, sizes: family.ModelSizes, norm: encoders.MakeNorm
) -> tuple[ScoreSpec, ...]:
    config, hidden = fields.config, sizes.hidden
    pooling = _POOLINGS.get(str(config.get("classifier_pooling", "cls")))
    if pooling is None:
        fields.refuse(
            f"classifier_pooling must be cls or mean, got {config['classifier_pooling']!r}"
        )
    named = config.get("classifier_activation", "gelu")
    activation = family.read_activation(fields, "classifier_activation", named)
    bias = bool(config.get("classifier_bias", False))
    matrix = LinearSpec("lm_head", hidden, (Part("head.dense", hidden),), "none", bias)
    inner = (matrix, activation, norm("head.norm"))
    of_text = ScoreSpec("classifier", True, pooling or "first", *inner)
    return of_text, replace(of_text, pooling="all")
