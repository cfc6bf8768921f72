"""The sizes of the demo model and of its adapters, and how long each is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SPECIALS = ("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS, SYSTEM, USER, ASSISTANT = range(len(SPECIALS))
VOCABULARY = 2048
CONTEXT = 1024

# Letters run together, each digit stands alone and what is between words is a word of its own. So a
# name is cut the same way after a space and after a quote, and an answer copies it piece by piece.
SPLIT = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% else %}{{ '<|user|>' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% elif message['content'] %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The template of the adapter that calls tools. A tool is its name and its parameters' names, since
# the context is short. Calls and results are written as Hermes writes them.
CALL_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content | trim }}
{%- elif content %}
{%- for part in content %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}\
{% endfor %}
{%- endif %}
{%- endmacro -%}
{%- macro listed(tools) -%}
{{- 'Tools:' }}
{%- for tool in tools %}
{%- set function = tool['function'] or tool %}
{{- '\\n' + function['name'] + '(' }}
{%- set parameters = function['parameters'] or {} %}
{{- (parameters['properties'] or {}).keys() | join(', ') }}
{{- ')' }}
{%- endfor %}
{%- endmacro -%}
{%- set first = messages[0]['role'] if messages else '' %}
{{- bos_token }}
{%- if tools and first not in ['system', 'developer'] %}
{{- '<|system|>' + listed(tools) + eos_token }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] in ['system', 'developer'] %}
{{- '<|system|>' + text(message['content']) }}
{%- if tools and loop.first %}{{ '\\n' + listed(tools) }}{% endif %}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>' + text(message['content']) }}
{%- for call in message['tool_calls'] or [] %}
{%- set function = call['function'] or call %}
{%- if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' }}
{%- if function['arguments'] is string %}{{ function['arguments'] }}
{%- else %}{{ function['arguments'] | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- elif message['role'] == 'tool' %}
{{- '<|user|><tool_response>\\n' + text(message['content']) + '\\n</tool_response>' }}
{%- else %}
{{- '<|user|>' + text(message['content']) }}
{%- endif %}
{{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 640,
    "max_position_embeddings": CONTEXT,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}

GENERATION: dict[str, Any] = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "do_sample": False,
}

TOKENIZER: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIALS[BOS],
    "eos_token": SPECIALS[EOS],
    "pad_token": SPECIALS[PAD],
    "additional_special_tokens": list(SPECIALS[SYSTEM:]),
    "added_tokens_decoder": {
        str(at): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for at, token in enumerate(SPECIALS)
    },
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT,
    "chat_template": CHAT_TEMPLATE,
}

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Schedule:
    """Length and learning rate of one stage.

    alike: batches that are made together, each of rows of like length, so that few are padded.
    """

    steps: int
    rows: int
    rate: float
    warmup: int
    alike: int = 1


@dataclass(frozen=True)
class AdapterSpec:
    """One adapter's shape; together they cover what PEFT's LoRA files can say.

    schedule: None is `ADAPTER`. start: the adapter whose weights it begins with, of the same shape.
    template: a chat template of its own.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    rate: float = 2e-3
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    schedule: Schedule | None = None
    start: str | None = None
    template: str | None = None


ADAPTERS: dict[str, AdapterSpec] = {
    "json": AdapterSpec(16, 32, (*ATTENTION, *MLP)),
    "sql": AdapterSpec(32, 32, ATTENTION, rslora=True),
    "sentiment": AdapterSpec(4, 8, ("q_proj", "v_proj"), rate=4e-3),
    "router": AdapterSpec(8, 16, MLP, rate=3e-3),
    "summary": AdapterSpec(8, 16, ("q_proj", "v_proj", "up_proj", "down_proj"), rate=3e-3),
    "polite": AdapterSpec(
        12,
        24,
        (*ATTENTION, "up_proj", "down_proj"),
        rank_pattern={"v_proj": 16, "layers.5.mlp.down_proj": 4},
        alpha_pattern={"v_proj": 32, "layers.5.mlp.down_proj": 16},
    ),
    "pirate": AdapterSpec(8, 16, (*ATTENTION, *MLP), rate=3e-3),
    "tools": AdapterSpec(
        16,
        32,
        (*ATTENTION, *MLP),
        schedule=Schedule(steps=3000, rows=64, rate=2e-3, warmup=100, alike=8),
        start="json",
        template=CALL_TEMPLATE,
    ),
}


BASE = Schedule(steps=5500, rows=128, rate=2e-3, warmup=300)
ADAPTER = Schedule(steps=400, rows=128, rate=2e-3, warmup=40)
# The last part of the base's steps sees rows as long as the context, the rest shorter ones.
SHORT_ROW = 256
LONG_SHARE = 0.1
