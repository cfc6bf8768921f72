"""`adapter_config.json` as trainers write it, of plain LoRA, from 2023 on."""

from typing import Any

Config = dict[str, Any]
QV = ["q_proj", "v_proj"]
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# What each version of PEFT writes of a config with its defaults: the keys that it added.
PEFT_0_3: Config = {
    "base_model_name_or_path": "decapoda-research/llama-7b-hf",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 8,
    "target_modules": QV,
    "task_type": "CAUSAL_LM",
}
PEFT_0_4: Config = PEFT_0_3 | {
    "auto_mapping": None,
    "base_model_name_or_path": "meta-llama/Llama-2-7b-hf",
    "layers_pattern": None,
    "layers_to_transform": None,
    "revision": None,
}
PEFT_0_5: Config = PEFT_0_4 | {"rank_pattern": {}, "alpha_pattern": {}}
PEFT_0_7: Config = PEFT_0_5 | {
    "loftq_config": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "base_model_name_or_path": "mistralai/Mistral-7B-v0.1",
}
PEFT_0_9: Config = PEFT_0_7 | {"use_rslora": False, "use_dora": False}
PEFT_0_11: Config = PEFT_0_9 | {"layer_replication": None}
PEFT_0_14: Config = PEFT_0_11 | {
    "eva_config": None,
    "exclude_modules": None,
    "lora_bias": False,
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
}
PEFT_0_15: Config = PEFT_0_14 | {"corda_config": None, "trainable_token_indices": None}
PEFT_0_17: Config = (
    PEFT_0_15 | {"qalora_group_size": 16, "use_qalora": False} | {"target_parameters": None}
)
PEFT_0_18: Config = PEFT_0_17 | {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "ensure_weight_tying": False,
    "peft_version": "0.18.1",
}
PEFT_0_21: Config = PEFT_0_18 | {
    "kasa_config": None,
    "lora_ga_config": None,
    "monteclora_config": None,
    "peft_version": "0.21.2.dev0@5d602fdbf",
    "use_bdlora": None,
    "velora_config": None,
}
UNSLOTH_MAPPING = {
    "base_model_class": "LlamaForCausalLM",
    "parent_library": "transformers.models.llama.modeling_llama",
    "unsloth_fixed": True,
}

PLAIN: dict[str, Config] = {
    # 2023
    "alpaca-lora, PEFT 0.2": {
        "base_model_name_or_path": "decapoda-research/llama-7b-hf",
        "bias": "none",
        "enable_lora": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "merge_weights": False,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 16,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
    },
    "PEFT 0.2 with merged weights": PEFT_0_3 | {"merge_weights": True, "enable_lora": None},
    "flags as text": PEFT_0_3 | {"merge_weights": "False", "fan_in_fan_out": "False"},
    "no inference_mode, no bias": {
        "base_model_name_or_path": "huggyllama/llama-7b",
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.1,
        "target_modules": QV,
    },
    "inference_mode as text": PEFT_0_4 | {"inference_mode": "True"},
    "QLoRA": PEFT_0_4 | {"r": 64, "target_modules": SEVEN, "lora_dropout": 0.0},
    # Versions of PEFT
    "PEFT 0.3": PEFT_0_3,
    "PEFT 0.4": PEFT_0_4,
    "PEFT 0.5": PEFT_0_5,
    "PEFT 0.7": PEFT_0_7,
    "PEFT 0.9": PEFT_0_9 | {"use_rslora": True},
    "PEFT 0.11": PEFT_0_11,
    "PEFT 0.14": PEFT_0_14,
    "PEFT 0.15": PEFT_0_15,
    "PEFT 0.17": PEFT_0_17 | {"exclude_modules": ["lm_head"], "target_modules": "all-linear"},
    "PEFT 0.18": PEFT_0_18 | {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3}},
    "PEFT 0.21": PEFT_0_21,
    "a later PEFT with a new feature off": PEFT_0_21 | {"new_config": None, "use_new": False},
    # Trainers
    "unsloth, quantised base": PEFT_0_15
    | {
        "auto_mapping": UNSLOTH_MAPPING,
        "base_model_name_or_path": "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit",
        "lora_dropout": 0,
        "target_modules": SEVEN,
        "r": 16,
    },
    "unsloth, pattern": PEFT_0_18
    | {
        "base_model_name_or_path": "unsloth/Llama-3.1-8B-Instruct",
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|"
        r"ffn|dense).*?(?:k_proj|v_proj|q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
        r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
        r"(?:(?:k_proj|v_proj|q_proj|up_proj)))",
    },
    "axolotl": PEFT_0_15 | {"r": 32, "lora_alpha": 16, "target_modules": SEVEN},
    "axolotl, for NVFP4": PEFT_0_21
    | {
        "nvfp4_merge_aware": {
            "scale_mode": "fresh",
            "pts_policy": "base_fused_max",
            "encoder": "torchao-0.15.0",
            "start_step": None,
        }
    },
    "axolotl, some layers": PEFT_0_15
    | {"layers_to_transform": [0, 1], "layers_pattern": None, "target_modules": QV},
    "LLaMA-Factory": PEFT_0_14
    | {"base_model_name_or_path": "/data/models/Llama-3.1-8B-Instruct", "lora_dropout": 0.0},
    "LLaMA-Factory, pattern": PEFT_0_15
    | {"target_modules": r"^(?!.*(?:visual|merger|lm_head)).*(?:q_proj|down_proj|o_proj).*"},
    "ms-swift": PEFT_0_15
    | {
        "base_model_name_or_path": "/root/.cache/modelscope/hub/models/LLM-Research/"
        "Meta-Llama-3___1-8B-Instruct",
        "target_modules": r"^(model(?=\.).*\.(k_proj|up_proj|v_proj|down_proj|gate_proj))$",
    },
    "ms-swift, older": PEFT_0_11
    | {"target_modules": r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*_proj"},
    "ms-swift, its own LoRA": PEFT_0_11
    | {
        "base_model_name_or_path": None,
        "enable_lora": None,
        "lora_dtype": None,
        "lorap_emb_lr": 1e-06,
        "lorap_lr_ratio": 16.0,
        "model_key_mapping": None,
        "swift_type": "LORA",
        "use_merged_linear": False,
        "use_qa_lora": False,
    },
    "torchtune": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "peft_type": "LORA",
        "base_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct",
    },
    "TRL": PEFT_0_17 | {"r": 16, "lora_alpha": 32, "task_type": None},
    "AutoTrain": PEFT_0_9
    | {"target_modules": SEVEN, "auto_mapping": {"base_model_class": "LlamaForCausalLM"}},
    "verl": PEFT_0_17 | {"target_modules": "all-linear", "inference_mode": False},
    "head and embedding": PEFT_0_14 | {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "Windows": PEFT_0_14
    | {"base_model_name_or_path": "C:\\Users\\me\\models\\Llama-3.1-8B-Instruct\\"},
    "Hub cache": PEFT_0_14
    | {
        "base_model_name_or_path": "/home/me/.cache/huggingface/hub/"
        "models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc894c89659"
    },
}

# The base that each of them means, by the words in its name.
BASES = {
    "llama-7b": ("huggyllama/llama-7b",),
    "Llama-2-7b": ("meta-llama/Llama-2-7b-hf",),
    "Mistral-7B": ("mistralai/Mistral-7B-v0.1",),
    "Llama-3": ("meta-llama/Llama-3.1-8B-Instruct",),
}

# What changes the maths, in configs of the same trainers -> the code.
OTHER: dict[str, tuple[Config, str]] = {
    "MergedLinear of PEFT 0.2": (PEFT_0_3 | {"enable_lora": [True, False]}, "unsupported_feature"),
    "DoRA as text": (PEFT_0_9 | {"use_dora": "False"}, "bad_value"),
    "rsLoRA as text": (PEFT_0_9 | {"use_rslora": "False"}, "bad_value"),
    "rank as text": (PEFT_0_3 | {"r": "8"}, "bad_value"),
    "LoftQ": (PEFT_0_7 | {"init_lora_weights": "loftq"}, "unsupported_feature"),
    "PiSSA": (PEFT_0_11 | {"init_lora_weights": "pissa_niter_16"}, "unsupported_feature"),
    "saved modules": (
        PEFT_0_14 | {"modules_to_save": ["lm_head", "v_proj"]},
        "unsupported_feature",
    ),
    "trained tokens": (PEFT_0_15 | {"trainable_token_indices": [1 << 30]}, "bad_value"),
    "activated LoRA of another vocabulary": (
        PEFT_0_18 | {"alora_invocation_tokens": [1 << 30]},
        "bad_value",
    ),
    "QA-LoRA": (PEFT_0_17 | {"use_qalora": True}, "unsupported_feature"),
    "experts' parameters": (PEFT_0_17 | {"target_parameters": ["w1"]}, "unknown_target"),
    "repeated layers": (PEFT_0_11 | {"layer_replication": [[0, 2]]}, "unsupported_feature"),
    "AdaLoRA": (PEFT_0_5 | {"peft_type": "ADALORA"}, "unsupported_peft_type"),
    "another tuner of ms-swift": (PEFT_0_11 | {"swift_type": "SCETUNING"}, "unsupported_feature"),
    "QA-LoRA of ms-swift": (PEFT_0_11 | {"use_qa_lora": True}, "unknown_key"),
    "mixture of LoRAs": (PEFT_0_3 | {"lora_nums": 4}, "unknown_key"),
    "a later PEFT with a new feature": (PEFT_0_21 | {"use_new": True}, "unknown_key"),
}
