"""The class that transformers' AutoTokenizer makes of a model's files (transformers 5.24). Pure.

Some classes run tokenizer.json as it stands; those of `REBUILT` take its vocabulary, merges and
post-processor, and bring the steps between of their own.
"""

from typing import Literal, get_args

RebuiltClass = Literal[
    "CodeLlamaTokenizer",
    "CohereTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
]
REBUILT: dict[str, RebuiltClass] = {name: name for name in get_args(RebuiltClass)}
# Other names of classes that cut texts alike.
_ALIKE: dict[str, RebuiltClass] = {
    "CodeGenTokenizer": "GPT2Tokenizer",
    "Phi3Tokenizer": "LlamaTokenizer",
}

# The class that a model type is registered with. Types that are in none of these have none.
_REGISTERED: dict[str, RebuiltClass] = {
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("codegen", "dbrx", "gpt2", "gpt_neo", "gptj", "jais2"), "GPT2Tokenizer"),
    **dict.fromkeys(("emu3", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("falcon_mamba", "gpt_neox", "mamba", "mamba2", "mpt"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("olmo", "olmoe", "rwkv", "xlstm"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "recurrent_gemma", "zaya"), "GemmaTokenizer"),
    "code_llama": "CodeLlamaTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_vl_moe", "qwen2_audio", "qwen2_5_omni"), "Qwen2Tokenizer"),
    **dict.fromkeys(("dots3_note", "moss_transcribe_diarize"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen4_exp"), "Qwen3_5Tokenizer"),
}
# Registered with the class that runs tokenizer.json as it stands, whatever the files name.
_AS_IT_STANDS = frozenset(
    ("ernie4_5", "ernie4_5_moe", "flex_olmo", "fuyu", "glm", "glm4", "glm4_moe", "glm4_moe_lite")
    + ("gpt_bigcode", "granite", "granitemoe", "granitemoehybrid", "granitemoeshared")
    + ("hyperclovax", "internlm2", "internlm3", "iquestcoder", "jamba", "kimi_linear", "arctic")
    + ("mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3")
    + ("mixtral", "modernbert-decoder", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "opencua")
    + ("beam", "bigbird_pegasus", "got_ocr2", "xlm-roberta-xl")
    + ("persimmon", "phi3", "phi3_v", "phimoe", "pixtral", "stablelm", "llava", "llava_next")
)
# Types whose files are known to name a wrong class.
_MISNAMED = _AS_IT_STANDS | {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"}


def rebuilt_class(model_type: object, declared: object, *, byte_level: bool) -> RebuiltClass | None:
    """Choose the class to rebuild a tokenizer as. None: tokenizer.json runs as it stands.

    declared: `tokenizer_class` of tokenizer_config.json, else of config.json. byte_level: the file
    spells bytes by stand-in characters.
    """
    known = model_type if isinstance(model_type, str) else ""
    registered = _REGISTERED.get(known)
    if not isinstance(declared, str) or not declared:
        return registered
    named = declared.removesuffix("Fast")
    if named == "LlamaTokenizer" and byte_level and known not in _MISNAMED:
        return None
    if known in _AS_IT_STANDS:
        return None
    if registered and known in _MISNAMED:
        return registered
    return REBUILT.get(named) or _ALIKE.get(named)
