"""Types whose code lies on the Hub: their tensors are those of a relative, under other names.

The relative of transformers is the oracle, with adapters merged into it by hand.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from loraplex.server.model.checkpoint.checkpoint import UnservedError, read_config
from loraplex.server.model.spec.base_spec import base_spec
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import make_model, save_model
from tests.server.model.slabs import pack_folder

Tensors = dict[str, torch.Tensor]
RANK = 3


class Code(NamedTuple):
    """A type. relative: a row of parity's table. settings: what differs from it. config: of
    `config.json`, made of the relative's. name: of a tensor, for the relative's. joined: modules of
    which the code makes one, by its name. adapted: modules within a layer, by the code's names.
    layers: the name before a layer's number. groups: in which joined modules have their rows.
    """

    relative: str
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = {}
    joined: Mapping[str, tuple[str, ...]] = {}
    adapted: tuple[str, ...] = ("self_attn.o_proj", "mlp.up_proj")
    layers: str = "model.layers"
    groups: int = 1


def named(model_type: str, architecture: str, *gone: str, **more: Any) -> Any:
    def config(usual: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in usual.items() if key not in gone}
        own = {"model_type": model_type, "architectures": [architecture]}
        code = {"AutoModelForCausalLM": f"modeling_{model_type}.{architecture}"}
        return {**kept, **own, "auto_map": code, **more}

    return config


def qwen(usual: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen",
        "architectures": ["QWenLMHeadModel"],
        **{key: usual[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "num_attention_heads": usual["num_attention_heads"],
        "intermediate_size": 2 * usual["intermediate_size"],
        "kv_channels": 16,
        "layer_norm_epsilon": usual["rms_norm_eps"],
        "rotary_emb_base": 1e4,
        "rotary_pct": 1.0,
        "seq_length": 128,
        "max_position_embeddings": 256,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "no_bias": True,
    }


def chatglm(usual: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "auto_map": {
            "AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration",
        },
        **{key: usual[key] for key in ("hidden_size", "num_attention_heads", "eos_token_id")},
        "padded_vocab_size": usual["vocab_size"],
        "num_layers": usual["num_hidden_layers"],
        "ffn_hidden_size": usual["intermediate_size"],
        "kv_channels": usual["head_dim"],
        "layernorm_epsilon": usual["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": usual["num_key_value_heads"],
        "seq_length": usual["max_position_embeddings"],
        "rope_ratio": 3,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "post_layer_norm": True,
        "rmsnorm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
    }


def deepseek(usual: Mapping[str, Any]) -> dict[str, Any]:
    gone = ("num_experts", "mlp_only_layers", "shared_expert_intermediate_size", "layer_types")
    config: dict[str, Any] = named("deepseek", "DeepseekForCausalLM", *gone)(usual)
    shared = usual["shared_expert_intermediate_size"] // usual["moe_intermediate_size"]
    return {
        **config,
        "n_routed_experts": usual["num_experts"],
        "n_shared_experts": shared,
        "first_k_dense_replace": len(usual["mlp_only_layers"]),
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    }


QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
CODES: dict[str, Code] = {
    "Yi": Code(
        "llama3",
        named("Yi", "YiForCausalLM"),
        ((".input_layernorm.", ".ln1."), (".post_attention_layernorm.", ".ln2.")),
    ),
    "xverse": Code("llama2", named("xverse", "XverseForCausalLM")),
    "mimo": Code("qwen2", named("mimo", "MiMoForCausalLM", num_nextn_predict_layers=1)),
    # Its shared experts have no gate. That of the relative, of zeros, gives a half.
    "deepseek": Code(
        "qwen2-moe",
        deepseek,
        ((".mlp.shared_expert.", ".mlp.shared_experts."),),
        {
            "mlp_only_layers": [0],
            "qkv_bias": False,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
        adapted=("self_attn.q_proj", "self_attn.o_proj"),
    ),
    "baichuan": Code(
        "llama2",
        named("baichuan", "BaiChuanForCausalLM", "num_key_value_heads"),
        joined={"self_attn.W_pack": QKV},
        adapted=("self_attn.W_pack", "mlp.down_proj"),
    ),
    "baichuan2": Code(
        "llama2",
        named("baichuan", "BaichuanForCausalLM"),
        joined={"self_attn.W_pack": QKV},
        adapted=("self_attn.W_pack", "self_attn.o_proj"),
    ),
    "internlm2": Code(
        "llama3",
        named("internlm2", "InternLM2ForCausalLM", bias=False),
        (
            ("model.embed_tokens.", "model.tok_embeddings."),
            ("lm_head.", "output."),
            (".input_layernorm.", ".attention_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            (".self_attn.o_proj.", ".attention.wo."),
            (".mlp.gate_proj.", ".feed_forward.w1."),
            (".mlp.up_proj.", ".feed_forward.w3."),
            (".mlp.down_proj.", ".feed_forward.w2."),
        ),
        joined={"attention.wqkv": QKV},
        adapted=("attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2"),
        groups=2,
    ),
    "qwen": Code(
        "qwen2",
        qwen,
        (
            ("model.embed_tokens.", "transformer.wte."),
            ("model.layers.", "transformer.h."),
            ("model.norm.", "transformer.ln_f."),
            (".input_layernorm.", ".ln_1."),
            (".post_attention_layernorm.", ".ln_2."),
            (".self_attn.o_proj.", ".attn.c_proj."),
            (".mlp.gate_proj.", ".mlp.w2."),
            (".mlp.up_proj.", ".mlp.w1."),
            (".mlp.down_proj.", ".mlp.c_proj."),
        ),
        {"num_key_value_heads": 4},
        {"attn.c_attn": QKV},
        ("attn.c_attn", "attn.c_proj", "mlp.w2", "mlp.c_proj"),
        "transformer.h",
    ),
    "chatglm": Code(
        "glm",
        chatglm,
        (
            ("model.embed_tokens.", "transformer.embedding.word_embeddings."),
            ("model.layers.", "transformer.encoder.layers."),
            ("model.norm.", "transformer.encoder.final_layernorm."),
            ("lm_head.", "transformer.output_layer."),
            (".self_attn.o_proj.", ".self_attention.dense."),
            (".mlp.gate_up_proj.", ".mlp.dense_h_to_4h."),
            (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
        ),
        {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 3e4,
                "partial_rotary_factor": 0.5,
            },
        },
        {"self_attention.query_key_value": QKV},
        ("self_attention.query_key_value", "mlp.dense_h_to_4h", "self_attention.dense"),
        "transformer.encoder.layers",
    ),
}


def respelled(code: Code, tensors: Tensors) -> Tensors:
    """Tensors of the relative as the code stores them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        joined = next((own for own, parts in code.joined.items() if within(name, parts)), None)
        if joined is not None:
            first = code.joined[joined][0]
            if first not in name:
                continue
            parts = [tensors[name.replace(first, part)] for part in code.joined[joined]]
            whole = torch.cat(parts)[places(code, parts)]
            name, tensor = name.replace(first, joined), whole
        for usual, own in code.names:
            name = name.replace(usual, own)
        found[name] = tensor.clone()
    return found


def places(code: Code, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of the parts, one part below the other, in the order of the code's module."""
    rows = torch.split(torch.arange(sum(map(len, parts))), [len(part) for part in parts])
    return torch.cat([of.view(code.groups, -1) for of in rows], dim=1).flatten()


def within(name: str, parts: tuple[str, ...]) -> bool:
    return any(f".{part}." in name for part in parts)


def usual_name(code: Code, module: str) -> str:
    for usual, own in code.names:
        if f".{module}.".endswith(own):
            return f".{module}.".replace(own, usual).strip(".")
    return module


def make(name: str, folder: Path) -> PreTrainedModel:
    """Save the relative as the code would; returns it."""
    code = CODES[name]
    model = make_model(code.relative, **code.settings)
    for weight_name, weight in model.named_parameters():
        if name == "deepseek" and "shared_expert_gate" in weight_name:
            torch.nn.init.zeros_(weight)
    save_model(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(code.config(config)))
    path = folder / "model.safetensors"
    stored = respelled(code, load_file(path))
    if name == "deepseek":
        stored = {key: stored[key] for key in stored if "shared_expert_gate" not in key}
        halved = (key for key in stored if "shared_experts.down_proj" in key)
        stored |= {key: stored[key] / 2 for key in [*halved]}
    save_file(stored, path)
    if name == "baichuan2":
        head = dict(model.named_parameters())["lm_head.weight"]
        with torch.no_grad():
            head.copy_(torch.nn.functional.normalize(head))
    return model


def adapt(code: Code, model: PreTrainedModel, folder: Path) -> None:
    """Write an adapter with the code's names, and merge it into the relative."""
    generator, tensors = torch.Generator().manual_seed(1), Tensors()
    weights = dict(model.named_parameters())
    for layer in range(model.config.num_hidden_layers):
        for module in code.adapted:
            parts = code.joined.get(module, (usual_name(code, module),))
            found = [weights[f"model.layers.{layer}.{part}.weight"] for part in parts]
            a = torch.randn(RANK, found[0].shape[1], generator=generator) * 0.2
            rows = sum(len(weight) for weight in found)
            b = torch.randn(rows, RANK, generator=generator) * 0.2
            path = f"base_model.model.{code.layers}.{layer}.{module}"
            tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
            delta = torch.empty(rows, a.shape[1])
            delta[places(code, found)] = 2.0 * b @ a
            deltas = torch.split(delta, [len(weight) for weight in found])
            with torch.no_grad():
                for weight, part in zip(found, deltas, strict=True):
                    weight.add_(part)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(module.rpartition(".")[2] for module in code.adapted),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CODES)
def test_as_the_relative_with_and_without_an_adapter(name: str, tmp_path: Path) -> None:
    code, folder = CODES[name], tmp_path / "base"
    plain = make(name, folder)
    adapted = make(name, folder)
    adapt(code, adapted, tmp_path / "adapter")
    driver = Driver(folder)
    spec = base_spec(read_config(folder), "0" * 64, ("base",))
    assert driver.load(0, *pack_folder(tmp_path / "adapter", spec), 0).error is None
    pairs = [
        (model, Stream(driver, row, prompt(5 + 12 * row, row), slot=slot, sampling=GREEDY))
        for row, (model, slot) in enumerate(((plain, -1), (adapted, 0)))
    ]
    generate(driver, [stream for _, stream in pairs], 4, 5)
    for model, stream in pairs:
        assert_parity(model, None, stream)
    driver.close()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("baichuan", {"max_position_embeddings": None}, "ALiBi"),
        ("xverse", {"num_experts": 8}, "num_experts"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct"),
        ("qwen", {"kv_channels": 0}, "head_dim"),
        ("internlm2", {"hidden_act": "glu"}, "hidden_act"),
        ("chatglm", {"position_encoding_2d": True}, "position_encoding_2d"),
        ("chatglm", {"rmsnorm": False}, "rmsnorm"),
        ("chatglm", {"auto_map": {"AutoModelForCausalLM": "x.Other"}}, "code of its own"),
    ],
)
def test_refused_by_name(name: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UnservedError, match=words):
        read_config(tmp_path)


def test_a_context_of_qwen_ends_where_its_scaling_begins(tmp_path: Path) -> None:
    make("qwen", tmp_path)
    assert read_config(tmp_path).max_context == 128
    path = tmp_path / "config.json"
    plain = {"use_dynamic_ntk": False, "use_logn_attn": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), **plain}))
    assert read_config(tmp_path).max_context == 256
