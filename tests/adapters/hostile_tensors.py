"""Tensors that are not what the config and the base say, and the codes that each has."""

from collections.abc import Callable
from typing import Any

import numpy as np

from loraplex.adapters.base import BaseSpec
from tests.adapters.spoils import (
    FIRST,
    FIRST_B,
    PREFIX,
    Q,
    Spoil,
    Tensors,
    both,
    config,
    entry,
    extra,
    file,
    header,
    renamed,
    stored_as,
    tensors,
    value,
    without,
)


def cases(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    """Name -> how a good folder is spoiled, and exactly what is found."""
    found = _strangers(base) | _names() | _shapes(base) | _values() | _together(base)
    found |= _magnitudes() | _biases(base) | _tables(base) | _heads(base)
    return {f"tensors: {name}": case for name, case in found.items()}


def _strangers(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    hidden, vocab = base.hidden_size, base.vocab_size
    copy = "base_weights_changed" if base.embedding_digests else "base_weights_included"
    layer = f"{PREFIX}model.layers.0"
    strangers: dict[str, tuple[str, *tuple[int, ...]]] = {
        "extra": ("other.weight", 2, 2),
        "dora magnitude": (f"{Q}.lora_magnitude_vector", hidden),
        "dora magnitude, newer": (f"{Q}.lora_magnitude_vector.weight", hidden),
        "lora bias": (f"{Q}.lora_B.bias", hidden),
        "bias": (f"{Q}.bias", hidden),
        "full module": (f"{Q}.weight", hidden, hidden),
        "base layer": (f"{Q}.base_layer.weight", hidden, hidden),
        "saved module": (f"{PREFIX}lm_head.modules_to_save.weight", vocab, hidden),
        "trained tokens": (f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", 1),
        "classifier": (f"{PREFIX}score.weight", 2, hidden),
        "norm": (f"{layer}.input_layernorm.weight", hidden),
        "adalora": (f"{Q}.lora_E", 8, 1),
        "ia3": (f"{Q}.ia3_l", hidden, 1),
        "prompt": ("prompt_embeddings", 4, hidden),
        "vera": (f"{Q}.vera_lambda_b", hidden),
        "traversal": ("../../etc/passwd", 1),
        "quantised scale": (f"{Q}.lora_A.weight_scale", 1),
    }
    found: dict[str, tuple[Spoil, set[str]]] = {
        name: (extra(*stranger), {"unknown_tensor"}) for name, stranger in strangers.items()
    }
    return found | {
        "head copy": (extra(f"{PREFIX}lm_head.weight", vocab, hidden), {copy}),
        "head resized": (extra(f"{PREFIX}lm_head.weight", 3, hidden), {"resized_embeddings"}),
        "embedding copy": (
            extra(f"{PREFIX}model.embed_tokens.base_layer.weight", vocab, hidden),
            {copy},
        ),
        "expert": (
            extra(f"{layer}.mlp.experts.0.gate_proj.lora_A.weight", 8, hidden),
            {"unknown_module"},
        ),
        "vision tower": (
            extra(f"{PREFIX}vision_tower.layers.0.self_attn.q_proj.lora_A.weight", 8, hidden),
            {"unknown_module"},
        ),
        "100 of them": (
            tensors(lambda t: t | {f"x{i}": np.ones(1, np.float32) for i in range(100)}),
            {"unknown_tensor", "more_violations"},
        ),
    }


def _names() -> dict[str, tuple[Spoil, set[str]]]:
    def first(old: str, new: str) -> Spoil:
        return renamed(FIRST, FIRST.replace(old, new))

    return {
        "unknown module": (first("q_proj", "w_proj"), {"unknown_module", "lone_tensor"}),
        "module elsewhere": (first("self_attn", "mlp"), {"unknown_module", "lone_tensor"}),
        "bare model": (first("model.model.", "model."), {"unknown_module", "lone_tensor"}),
        "no prefix": (first(PREFIX, ""), {"unknown_tensor", "lone_tensor"}),
        "other adapter": (first("lora_A", "lora_A.custom"), {"unknown_tensor", "lone_tensor"}),
        "layer beyond": (first("layers.0", "layers.99"), {"layer_out_of_range", "lone_tensor"}),
        "layer 999999": (first("layers.0", "layers.999999"), {"layer_out_of_range", "lone_tensor"}),
        "layer of 100 digits": (
            first("layers.0", f"layers.{'9' * 100}"),
            {"unknown_module", "lone_tensor"},
        ),
        "layer 00": (first("layers.0", "layers.00"), {"unknown_module", "lone_tensor"}),
        "layer -1": (first("layers.0", "layers.-1"), {"unknown_module", "lone_tensor"}),
        "layer in Arabic digits": (first("layers.0", "layers.\u0660"), {"bad_tensor_name"}),
        "name with a zero width space": (first("q_proj", "q_proj\u200b"), {"bad_tensor_name"}),
        "name with nul": (first("q_proj", "q_proj\0"), {"bad_tensor_name"}),
        "upper case": (first("q_proj", "Q_PROJ"), {"unknown_module", "lone_tensor"}),
        "stored twice": (
            tensors(lambda t: t | {FIRST.replace("lora_A", "lora_A.default"): t[FIRST]}),
            {"duplicate_tensor"},
        ),
        "lone A": (without("0.self_attn.q_proj.lora_B"), {"lone_tensor"}),
        "lone B": (without("0.self_attn.q_proj.lora_A"), {"lone_tensor"}),
        "none": (tensors(lambda t: {}), {"no_tensors"}),
        "left out, random initially": (
            both(config(init_lora_weights=False), without("0.self_attn.q_proj")),
            {"missing_tensor"},
        ),
        "linear as embedding": (extra(f"{Q}.lora_embedding_A", 8, 32), {"misplaced_tensor"}),
        "linear without weight": (extra(f"{Q}.lora_A", 8, 32), {"misplaced_tensor"}),
    }


def _shapes(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    hidden, vocab = base.hidden_size, base.vocab_size
    embedding = f"{PREFIX}model.embed_tokens"

    def first(change: Callable[[Any], Any], *expected: str) -> tuple[Spoil, set[str]]:
        def reshape(found: Tensors) -> Tensors:
            return found | {FIRST: np.ascontiguousarray(change(found[FIRST]), np.float32)}

        return tensors(reshape), set(expected)

    targets = config(target_modules=["q_proj", "v_proj", "embed_tokens"])
    return {
        "transposed": first(lambda a: a.T, "shape_mismatch"),
        "other hidden size": first(lambda a: np.ones((8, hidden + 1)), "shape_mismatch"),
        "one dimension": first(lambda a: a.ravel(), "shape_mismatch"),
        "three dimensions": first(lambda a: a[None], "shape_mismatch"),
        "no dimension": first(lambda a: np.ones(()), "shape_mismatch"),
        "empty": first(lambda a: np.ones((0, hidden)), "rank_mismatch"),
        "ranks of A and B differ": (
            tensors(lambda t: t | {FIRST_B: np.ones((hidden, 7), np.float32)}),
            {"rank_mismatch"},
        ),
        "A and B exchanged": (
            tensors(lambda t: t | {FIRST: t[FIRST_B], FIRST_B: t[FIRST]}),
            {"shape_mismatch"},
        ),
        "embedding as linear": (
            both(targets, extra(f"{embedding}.lora_A.weight", 8, vocab)),
            {"misplaced_tensor"},
        ),
        "embedding transposed": (
            both(
                targets,
                extra(f"{embedding}.lora_embedding_A", vocab, 8),
                extra(f"{embedding}.lora_embedding_B", 8, hidden),
            ),
            {"shape_mismatch"},
        ),
        "larger vocabulary": (
            both(
                targets,
                extra(f"{embedding}.lora_embedding_A", 8, vocab + 1),
                extra(f"{embedding}.lora_embedding_B", hidden, 8),
            ),
            {"shape_mismatch"},
        ),
    }


def _values() -> dict[str, tuple[Spoil, set[str]]]:
    def everywhere(found: Tensors) -> Tensors:
        return {name: np.full_like(array, np.nan) for name, array in found.items()}

    def infinite(found: Tensors) -> Tensors:
        return found | {FIRST_B: np.full_like(found[FIRST_B], np.inf)}

    def claimed(dtype: str, narrower: int) -> Spoil:
        """Of another dtype, with a shape that fits its bytes."""
        return entry(dtype=dtype, shape=lambda shape: [shape[0] * narrower, shape[1]])

    return {
        "nan": (value(float("nan")), {"not_finite"}),
        "infinity": (value(float("inf")), {"not_finite"}),
        "minus infinity": (value(float("-inf")), {"not_finite"}),
        "nan everywhere": (tensors(everywhere), {"not_finite"}),
        "nan of bfloat16": (stored_as("BF16", everywhere), {"not_finite"}),
        "nan of float16": (stored_as("F16", everywhere), {"not_finite"}),
        "infinity of float16": (stored_as("F16", infinite), {"not_finite"}),
        "int32": (entry(dtype="I32"), {"unsupported_dtype"}),
        "uint32": (entry(dtype="U32"), {"unsupported_dtype"}),
        "bytes": (claimed("U8", 4), {"unsupported_dtype", "rank_mismatch"}),
        "booleans": (claimed("BOOL", 4), {"unsupported_dtype", "rank_mismatch"}),
        "exponents alone": (claimed("F8_E8M0", 4), {"unsupported_dtype", "rank_mismatch"}),
    }


def _magnitudes() -> dict[str, tuple[Spoil, set[str]]]:
    """Of DoRA."""
    first = f"{Q}.lora_magnitude_vector"

    def dora(change: Callable[[Tensors], Tensors], **keys: Any) -> Spoil:
        def with_magnitudes(found: Tensors) -> Tensors:
            lengths = {
                name.replace("lora_B.weight", "lora_magnitude_vector"): np.ones(len(b), np.float32)
                for name, b in found.items()
                if "lora_B" in name
            }
            return change(found | lengths)

        return both(config(use_dora=True, **keys), tensors(with_magnitudes))

    def put(name: str, *values: float) -> Callable[[Tensors], Tensors]:
        return lambda t: t | {name: np.resize(np.array(values, np.float32), t[first].shape)}

    def wreck(found: Tensors) -> Tensors:
        found[first] = np.full((3, 1), np.nan, np.float32)
        return {n: t for n, t in found.items() if "1.self_attn.v_proj.lora_m" not in n}

    def without_pair(found: Tensors) -> Tensors:
        return {n: t for n, t in found.items() if n not in (FIRST, FIRST_B)}

    strange = first.replace("q_proj", "w_proj")
    return {
        "dora without magnitudes": (config(use_dora=True), {"lone_tensor"}),
        "magnitudes alone": (dora(without_pair), {"lone_tensor"}),
        "magnitudes with nan": (dora(put(first, 1.0, np.nan)), {"not_finite"}),
        "magnitudes without end": (dora(put(first, np.inf)), {"not_finite"}),
        "magnitudes of too few": (
            dora(lambda t: t | {first: t[first][:-1]}),
            {"shape_mismatch"},
        ),
        "magnitudes in a column": (
            dora(lambda t: t | {first: t[first][:, None]}),
            {"shape_mismatch"},
        ),
        "magnitudes twice": (dora(put(f"{first}.weight", 1.0)), {"duplicate_tensor"}),
        "magnitudes of no module": (dora(put(strange, 1.0)), {"unknown_module"}),
        "magnitudes of another module": (
            dora(put(first.replace("q_proj", "o_proj"), 1.0)),
            {"untargeted_tensor"},
        ),
        "activated dora": (
            dora(lambda t: t, alora_invocation_tokens=[1]),
            {"unsupported_feature"},
        ),
        "dora, all of it": (dora(wreck), {"shape_mismatch", "not_finite", "lone_tensor"}),
    }


def _biases(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    """That a config switches on."""
    of_b, own, hidden = f"{Q}.lora_B.bias", f"{Q}.base_layer.bias", base.hidden_size

    def biased(*added: tuple[str, int], **keys: Any) -> Spoil:
        return both(config(**keys), *(extra(*each) for each in added))

    def of_all_b(**keys: Any) -> Spoil:
        def with_biases(found: Tensors) -> Tensors:
            pairs = [(name, b) for name, b in found.items() if "lora_B" in name]
            return found | {
                name.replace("weight", "bias"): np.ones(len(b), np.float32) for name, b in pairs
            }

        return both(config(lora_bias=True, **keys), tensors(with_biases))

    embed = ["q_proj", "v_proj", "embed_tokens"]
    return {
        "no bias of B": (config(lora_bias=True), {"lone_tensor"}),
        "bias of B too short": (
            both(of_all_b(), extra(of_b, hidden - 1)),
            {"shape_mismatch"},
        ),
        "bias of B with nan": (
            both(of_all_b(), tensors(lambda t: t | {of_b: t[of_b] * np.nan})),
            {"not_finite"},
        ),
        "bias of B with dora": (of_all_b(use_dora=True), {"unsupported_feature", "lone_tensor"}),
        "bias of B of an embedding": (
            of_all_b(target_modules=embed),
            {"unsupported_feature"},
        ),
        "bias of B twice": (
            both(of_all_b(), extra(f"{Q}.lora_B.default.bias", hidden)),
            {"duplicate_tensor"},
        ),
        "bias that the base has not": (
            biased((own, hidden), bias="lora_only"),
            {"unknown_tensor"},
        ),
        "bias of a norm": (
            biased((f"{PREFIX}model.norm.bias", hidden), bias="all"),
            {"unknown_tensor"},
        ),
        "bias of no module": (
            biased((f"{Q.replace('q_proj', 'w_proj')}.bias", hidden), bias="all"),
            {"unknown_tensor"},
        ),
    }


def _tables(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    """Rows in place of the base's."""
    hidden, vocab = base.hidden_size, base.vocab_size
    head, embed = f"{PREFIX}lm_head.weight", f"{PREFIX}model.embed_tokens"
    rows = f"{embed}.token_adapter.trainable_tokens_delta"

    def with_head(*shape: int, fill: float = 1.0) -> Spoil:
        array = np.full(shape, fill, np.float32)
        return both(config(modules_to_save=["lm_head"]), tensors(lambda t: t | {head: array}))

    def with_rows(*shape: int, ids: Any = (3, 5), fill: float = 1.0) -> Spoil:
        array, keys = np.full(shape, fill, np.float32), list(ids)
        return both(config(trainable_token_indices=keys), tensors(lambda t: t | {rows: array}))

    return {
        "no saved head": (config(modules_to_save=["lm_head"]), {"missing_tensor"}),
        "saved head of another vocabulary": (
            with_head(vocab + 8, hidden),
            {"missing_tensor"},
        ),
        "saved head of too many tokens": (
            with_head(base.most_ids + 1, hidden),
            {"resized_embeddings", "missing_tensor"},
        ),
        "saved head with nan": (with_head(vocab, hidden, fill=np.nan), {"not_finite"}),
        "saved head twice": (
            both(
                with_head(vocab, hidden),
                extra(f"{PREFIX}lm_head.base_layer.weight", vocab, hidden),
            ),
            {"duplicate_tensor"},
        ),
        "no trained rows": (config(trainable_token_indices=[3]), {"missing_tensor"}),
        "trained rows of more tokens": (with_rows(3, hidden), {"shape_mismatch"}),
        "trained rows of another size": (with_rows(2, hidden + 1), {"shape_mismatch"}),
        "trained rows with nan": (with_rows(2, hidden, fill=np.nan), {"not_finite"}),
        "trained rows behind a gap": (
            with_rows(2, hidden, ids=(3, vocab + 5)),
            {"resized_embeddings"},
        ),
        "trained rows far beyond the vocabulary": (
            with_rows(2, hidden, ids=(3, 1 << 30)),
            {"bad_value", "resized_embeddings"},
        ),
        "trained rows of no table": (
            both(with_rows(2, hidden), extra(f"{PREFIX}x.token_adapter.trainable_tokens_delta", 2)),
            {"unknown_tensor"},
        ),
        "trained rows of the other table": (
            both(
                with_rows(2, hidden),
                extra(f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta", 2, hidden),
            ),
            {"unknown_tensor"},
        ),
        "trained rows, all of it": (
            both(with_rows(1, hidden, ids=(3, vocab + 5), fill=np.inf), extra(f"{Q}.lora_E", 1)),
            {"resized_embeddings", "shape_mismatch", "not_finite", "unknown_tensor"},
        ),
    }


def _heads(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    name, hidden = f"{PREFIX}score.weight", base.hidden_size
    named = config(task_type="SEQ_CLS", modules_to_save=["classifier", "score"])

    def with_head(*shape: int, fill: float = 0.5) -> Spoil:
        array = np.full(shape, fill, np.float32)
        return both(named, tensors(lambda t: t | {name: array}))

    def labelled(text: str) -> Spoil:
        return both(with_head(3, hidden), file("config.json", text))

    second = {f"{PREFIX}score._fsdp_wrapped_module.weight": np.ones((3, hidden), np.float32)}
    return {
        "no score head": (named, {"missing_tensor"}),
        "score head of another width": (with_head(3, hidden + 1), {"shape_mismatch"}),
        "score head of no labels": (with_head(0, hidden), {"shape_mismatch"}),
        "score head of one dimension": (with_head(hidden), {"shape_mismatch"}),
        "score head of too many labels": (with_head(4097, hidden), {"shape_mismatch"}),
        "score head with nan": (with_head(3, hidden, fill=np.nan), {"not_finite"}),
        "score head as integers": (
            both(with_head(3, hidden), header(lambda h: h | {name: h[name] | {"dtype": "I32"}})),
            {"unsupported_dtype"},
        ),
        "two score heads": (
            both(with_head(3, hidden), tensors(lambda t: t | second)),
            {"duplicate_tensor"},
        ),
        "score head and another classifier": (
            both(with_head(3, hidden), extra(f"{PREFIX}classifier.weight", 3, hidden)),
            {"unknown_tensor"},
        ),
        "score head and a head for text": (
            both(with_head(3, hidden), config(modules_to_save=["lm_head", "score"])),
            {"unsupported_feature", "missing_tensor"},
        ),
        "score head with a bias": (
            both(with_head(3, hidden), extra(f"{PREFIX}score.bias", 3)),
            {"unknown_tensor"},
        ),
        "score head of an activated adapter": (
            both(with_head(3, hidden), config(alora_invocation_tokens=[1])),
            {"unsupported_feature"},
        ),
        "labels of another head": (
            labelled('{"id2label": {"0": "a", "1": "b"}}'),
            {"labels_mismatch"},
        ),
        "labels with a gap": (labelled('{"id2label": {"0": "a", "2": "b"}}'), {"bad_value"}),
        "labels that are a list": (labelled('{"id2label": ["a"]}'), {"bad_value"}),
        "labels that are no JSON": (labelled("{"), {"bad_config"}),
        "scores through a layer": (
            labelled('{"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}'),
            {"bad_value"},
        ),
        "score head, all of it": (
            both(with_head(3, hidden + 1, fill=np.inf), extra(f"{Q}.lora_E", 1)),
            {"shape_mismatch", "not_finite", "unknown_tensor"},
        ),
    }


def _together(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    def wreck(found: Tensors) -> Tensors:
        found[FIRST][0, 0] = np.nan
        found[FIRST_B] = np.ones((base.hidden_size, 5), np.float32)
        found["stranger"] = np.ones(3, np.float32)
        return {
            name: array for name, array in found.items() if "1.self_attn.v_proj.lora_A" not in name
        }

    return {
        "nan, other rank, stranger and half a pair": (
            tensors(wreck),
            {"not_finite", "rank_mismatch", "unknown_tensor", "lone_tensor"},
        ),
        "of another base, with nan": (
            both(config(base_model_name_or_path="x/y"), value(float("nan"))),
            {"wrong_base", "not_finite"},
        ),
    }
