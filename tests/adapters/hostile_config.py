"""Configs that lie or trick, and the codes of the violations that each has."""

import json
from typing import Any

from tests.adapters.spoils import Spoil, both, config, extra, file, value

CONFIG = "adapter_config.json"
_DEEP = json.loads('{"a":' * 40 + "1" + "}" * 40)
_NO_MATCH = {"unknown_target", "untargeted_tensor"}
# Values of features that change the maths.
_FEATURES: dict[str, Any] = {
    "arrow_config": {},
    "kasa_config": {},
    "layer_replication": [[0, 1], [0, 2]],
    "lora_ga_config": {},
    "megatron_config": {},
    "modules_to_save": ["up_proj"],
    "monteclora_config": {},
    "trainable_token_indices": {"wpe": [3]},
    "use_bdlora": {"target_modules_bd_a": []},
    "use_qalora": True,
    "velora_config": {},
}


def cases() -> dict[str, tuple[Spoil, set[str]]]:
    """Name -> how a good folder is spoiled, and exactly what is found."""
    found = _features() | _values() | _targets() | _patterns() | _documents() | _together()
    return {f"config: {name}": case for name, case in found.items()}


def _features() -> dict[str, tuple[Spoil, set[str]]]:
    features: dict[str, tuple[Spoil, set[str]]] = {
        f"{key}": (config(**{key: wanted}), {"unsupported_feature"})
        for key, wanted in _FEATURES.items()
    }
    for ids in ([], [-1], ["<|x|>"], [1 << 40], "<|x|>", [True]):
        features[f"invocation {ids}"] = (config(alora_invocation_tokens=ids), {"bad_value"})
    for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "magic", 7):
        features[f"init {init}"] = (config(init_lora_weights=init), {"unsupported_feature"})
    for kind in ("IA3", "ADALORA", "lora", None, ["LORA"]):
        features[f"type {kind}"] = (config(peft_type=kind), {"unsupported_peft_type"})
    return features | {
        "head saved and targeted": (
            config(modules_to_save=["lm_head"], target_modules=["q_proj", "v_proj", "lm_head"]),
            {"missing_tensor"},
        ),
        "head saved of an activated adapter": (
            config(modules_to_save=["lm_head"], alora_invocation_tokens=[1]),
            {"unsupported_feature", "missing_tensor"},
        ),
        "rows of a saved head": (
            config(modules_to_save=["lm_head"], trainable_token_indices={"lm_head": [1]}),
            {"unsupported_feature", "missing_tensor"},
        ),
        "trained token negative": (config(trainable_token_indices=[-1]), {"bad_value"}),
        "trained token twice": (config(trainable_token_indices=[1, 2, 1]), {"bad_value"}),
        "trained token as text": (config(trainable_token_indices=["a"]), {"bad_value"}),
        "trained token true": (config(trainable_token_indices={"lm_head": [True]}), {"bad_value"}),
        "trained tokens too many": (
            config(trainable_token_indices=[*range(9000)]),
            {"bad_value"},
        ),
        "trained tokens of one table twice": (
            config(trainable_token_indices={"embed_tokens": [1], "model.embed_tokens": [2]}),
            {"unsupported_feature"},
        ),
        "bias true": (config(bias=True), {"bad_value"}),
        "bias of another name": (config(bias="boft_only"), {"bad_value"}),
        "biases of an activated adapter": (
            config(bias="all", alora_invocation_tokens=[1]),
            {"unsupported_feature"},
        ),
        "unknown key": (config(lora_gating=True), {"unknown_key"}),
        "remote code": (config(auto_map={"AutoModel": "evil.py--M"}), {"unknown_key"}),
        "surrogate key": (config(**{"\ud800": 1}), {"unknown_key"}),
    }


def _values() -> dict[str, tuple[Spoil, set[str]]]:
    bad: dict[str, Any] = {
        "rank 0": {"r": 0},
        "rank negative": {"r": -8},
        "rank float": {"r": 8.0},
        "rank true": {"r": True},
        "rank text": {"r": "8"},
        "rank null": {"r": None},
        "alpha 0": {"lora_alpha": 0},
        "alpha huge": {"lora_alpha": 1e38},
        "alpha of 4000 digits": {"lora_alpha": 10**4000},
        "alpha text": {"lora_alpha": "8"},
        "alpha true": {"lora_alpha": True},
        "alpha null": {"lora_alpha": None},
        "rslora text": {"use_rslora": "yes"},
        "fan_in_fan_out number": {"fan_in_fan_out": 1},
        "base is a list": {"base_model_name_or_path": ["org/base"]},
        "base is long": {"base_model_name_or_path": "b" * 600},
        "revision is a number": {"revision": 1},
        "layers text": {"layers_to_transform": "0"},
        "layers negative": {"layers_to_transform": [-1]},
        "layers true": {"layers_to_transform": [True]},
        "layers of 10000": {"layers_to_transform": list(range(10_000))},
        "layers with a pattern": {"target_modules": ".*", "layers_to_transform": [0]},
        "layers_pattern alone": {"layers_pattern": "layers"},
        "layers_pattern of 100": {
            "layers_to_transform": [0],
            "layers_pattern": [f"layers{i}" for i in range(100)],
        },
        "rank_pattern list": {"rank_pattern": ["q_proj"]},
        "rank_pattern text": {"rank_pattern": {"q_proj": "8"}},
        "rank_pattern of 2000": {"rank_pattern": {f"m{i}": 8 for i in range(2000)}},
        "alpha_pattern null": {"alpha_pattern": {"q_proj": None}},
        "alpha_pattern cyrillic": {"alpha_pattern": {"q_pro\u0458": 8}},
    }
    return {name: (config(**changes), {"bad_value"}) for name, changes in bad.items()} | {
        "rank above tensors": (config(r=16), {"rank_mismatch"}),
        "rank below tensors": (config(r=4), {"rank_mismatch"}),
        "rank above the limit": (config(r=60_000), {"rank_too_large", "rank_mismatch"}),
        "rank_pattern lies": (config(rank_pattern={"q_proj": 2}), {"rank_mismatch"}),
        "alpha infinite": (
            file(
                CONFIG, '{"peft_type": "LORA", "lora_alpha": 1e400, "target_modules": ["v_proj"]}'
            ),
            {"bad_value"},
        ),
        "base has an escape": (
            config(base_model_name_or_path="org/base\x1b[2J"),
            {"bad_value", "wrong_base"},
        ),
        "other base": (config(base_model_name_or_path="other/llama-7b"), {"wrong_base"}),
        "base is a path": (config(base_model_name_or_path="../../etc/passwd"), {"wrong_base"}),
    }


def _targets() -> dict[str, tuple[Spoil, set[str]]]:
    bad: dict[str, Any] = {
        "null": None,
        "empty": [],
        "empty text": "",
        "object": {"q_proj": 1},
        "number": 5,
        "with a number": ["q_proj", 3],
        "homoglyph": ["q_proj", "v_pro\u0458"],
        "zero width": ["q_proj\u200b"],
        "20000": [f"m{i}" for i in range(20_000)],
        "long name": ["q" * 600],
        "long pattern": "q" * 5000,
    }
    refused: dict[str, tuple[Spoil, set[str]]] = {
        f"targets {name}": (config(target_modules=targets), {"bad_value"})
        for name, targets in bad.items()
    }
    return refused | {
        "targets unknown": (config(target_modules=["c_attn"]), _NO_MATCH),
        "targets experts": (config(target_modules=["experts.0.w1", "router.gate"]), _NO_MATCH),
        "targets narrowed": (config(target_modules=["q_proj"]), {"untargeted_tensor"}),
        "layers narrowed": (config(layers_to_transform=[0]), {"untargeted_tensor"}),
        "layers beyond": (config(layers_to_transform=[4000]), _NO_MATCH),
        "excluded": (config(exclude_modules=["v_proj"]), {"untargeted_tensor"}),
        "all excluded": (config(exclude_modules=".*"), _NO_MATCH),
    }


def _patterns() -> dict[str, tuple[Spoil, set[str]]]:
    bad: dict[str, Any] = {
        "regex of many states": {"target_modules": "(((((a{99}){99}){99}){99}){99})"},
        "regex flags": {"target_modules": "(?i).*Q_PROJ"},
        "regex backreference": {"target_modules": r"(.)\1*"},
        "regex possessive": {"target_modules": ".*+"},
        "regex unbalanced": {"exclude_modules": "(("},
        "regex deep": {"target_modules": "(" * 100 + ")" * 100},
        "regexes of many states": {
            "rank_pattern": {"(.?){250}" * 10 + f"{i}": 8 for i in range(40)}
        },
        "layers_pattern regex": {"layers_to_transform": [0], "layers_pattern": ["(a|b)*"]},
    }
    return {name: (config(**changes), {"bad_pattern"}) for name, changes in bad.items()} | {
        "regex that backtracks": (config(target_modules="(.*.*.*.*)*(a+)+$"), _NO_MATCH),
    }


def _documents() -> dict[str, tuple[Spoil, set[str]]]:
    bad: dict[str, bytes | str] = {
        "yaml": "r: 8",
        "empty": "",
        "spaces": " \n" * 99,
        "list": "[1]",
        "text": '"LORA"',
        "nan": '{"lora_alpha": NaN}',
        "infinity": '{"lora_alpha": -Infinity}',
        "r twice": '{"r": 8, "r": 4}',
        "r twice, once escaped": '{"r": 8, "\\u0072": 4}',
        "unclosed": '{"a":' * 9999,
        "too deep": json.dumps({"peft_type": "LORA", "eva_config": _DEEP}),
        "brackets": "[" * 500_000,
        "rank of 5000 digits": '{"peft_type": "LORA", "r": ' + "9" * 5000 + "}",
        "utf-16": '{"r": 8}'.encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + b"{}",
        "not utf-8": b'{"peft_type": "LOR\xff"}',
        "nul bytes": b"\0" * 64,
        "comment": '{"peft_type": "LORA", /* r */ "r": 8}',
        "two documents": "{}{}",
        "single quotes": "{'peft_type': 'LORA'}",
        "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\x03",
    }
    return {name: (file(CONFIG, data), {"bad_config"}) for name, data in bad.items()} | {
        "huge": (file(CONFIG, " " * (2 << 20)), {"file_too_large"}),
    }


def _together() -> dict[str, tuple[Spoil, set[str]]]:
    return {
        "many lies": (
            config(use_qalora=True, base_model_name_or_path="x/y", r=9),
            {"unsupported_feature", "wrong_base", "rank_mismatch"},
        ),
        "lies in every part": (
            both(
                value(float("nan")),
                config(peft_type="X", lora_alpha=0, base_model_name_or_path="x/y", gate=1),
                file("added_tokens.json", '{"<new>": 99999}'),
            ),
            {"unsupported_peft_type", "bad_value", "wrong_base", "unknown_key", "not_finite"}
            | {"added_tokens"},
        ),
        "lies about what is targeted": (
            both(value(float("inf")), extra("other.weight", 2), config(target_modules="((")),
            {"bad_pattern", "not_finite", "unknown_tensor"},
        ),
        "200 unknown keys": (
            config(**{f"key{i}": 1 for i in range(200)}),
            {"unknown_key", "more_violations"},
        ),
    }
