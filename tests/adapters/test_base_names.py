"""Which names mean the same base model: other spellings of it, and no other model."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.peft.validate import names_base, normal_name

# A base's names -> names that mean it.
SAME: dict[tuple[str, ...], tuple[str, ...]] = {
    ("meta-llama/Llama-3.1-8B-Instruct",): (
        "",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
        "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit",
        "unsloth/Llama-3.1-8B-Instruct-unsloth",
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4",
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-BNB-NF4",
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8",
        "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8-dynamic",
        "nvidia/Llama-3.1-8B-Instruct-FP8",
        "amd/Llama-3.1-8B-Instruct-FP8-KV",
        "mlx-community/Meta-Llama-3.1-8B-Instruct-8bit",
        "lmstudio-community/Meta-Llama-3.1-8B-Instruct-MLX-4bit",
        "someone/Llama-3.1-8B-Instruct-4bit-mlx",
        "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
        "LLM-Research/Meta-Llama-3___1-8B-Instruct",
        "/mnt/workspace/.cache/modelscope/hub/LLM-Research/Meta-Llama-3___1-8B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct@main",
        "models/llama-3_1-8b-instruct",
        "D:\\llms\\Llama3.1-8B-Instruct\\",
        "/data/meta-llama_Llama-3.1-8B-Instruct",
        "https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct",
    ),
    ("meta-llama/Llama-2-7b-hf",): (
        "meta-llama/Llama-2-7b",
        "NousResearch/Llama-2-7b-hf",
        "TheBloke/Llama-2-7B-GPTQ",
        "TheBloke/Llama-2-7B-AWQ",
        "unsloth/llama-2-7b-bnb-4bit",
        "shakechen/Llama-2-7b-hf",
        "/root/.cache/huggingface/hub/models--meta-llama--Llama-2-7b-hf/snapshots/"
        "01c7f73d771dfac7d292323805ebc428287df4f9",
        "C:\\Users\\me\\.cache\\huggingface\\hub\\models--meta-llama--Llama-2-7b-hf\\snapshots\\01c7",
        "~/models/Llama-2-7b-hf/",
        "./Llama-2-7b-hf-sharded-bf16",
        "Trelis/Llama-2-7b-hf-sharded-bf16-5GB",
        "someone/Llama-2-7b-hf-sharded-max-5gb-fp16",
        "abhishek/llama-2-7b-hf-small-shards",
        "someone/llama-2-7b-hf-shards-8",
        "someone/Llama-2-7B-colab",
        "someone/llama-2-7b-4bit-free-colab",
        "someone/Llama-2-7b-hf_resharded_for_colab",
        "someone/Llama-2-7b-hf-mirror",
        "someone/Llama-2-7b-hf-copy",
        "meta-llama--Llama-2-7b-hf",
        "Llama-2-7B-fp16",
    ),
    ("Qwen/Qwen2.5-7B-Instruct", "qwen"): (
        "qwen",
        "qwen/Qwen2.5-7B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8",
        "Qwen/Qwen2.5-7B-Instruct-AWQ",
        "unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit",
        "mlx-community/Qwen2.5-7B-Instruct-4bit",
        "C:\\Users\\me\\models\\Qwen2.5-7B-Instruct",
        "C:/Users/me/models/Qwen2.5-7B-Instruct//",
        "\\\\server\\share\\Qwen2.5-7B-Instruct",
        "~/.cache/modelscope/hub/models/Qwen/Qwen2___5-7B-Instruct",
        "/home/me/.cache/modelscope/hub/Qwen/Qwen2___5-7B-Instruct/",
        "../base/qwen2.5_7b_instruct",
        "/Users/me/Documents/My Models/Qwen2.5 7B Instruct",
    ),
    ("mistralai/Mistral-7B-v0.1", "/srv/models/mistral"): (
        "AI-ModelScope/Mistral-7B-v0___1",
        "alpindale/Mistral-7B-v0.1-sharded",
        "TheBloke/Mistral-7B-v0.1-GPTQ-4bit-128g",
        "TheBloke/Mistral-7B-v0.1-4-bit",
    ),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",): (
        "AI-ModelScope/TinyLlama-1___1B-Chat-v1___0",
        "TheBloke/TinyLlama-1.1B-Chat-v1.0-GPTQ",
    ),
    ("unsloth/llama-3-8b-Instruct-bnb-4bit",): (
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "LLM-Research/Meta-Llama-3-8B-Instruct",
    ),
    ("/srv/models/Qwen3-8B-FP8",): ("Qwen/Qwen3-8B", "unsloth/Qwen3-8B-unsloth-bnb-4bit"),
    ("/kaggle/input/llama-3/transformers/8b-chat-hf/1",): (
        "/kaggle/input/llama-3/transformers/8b-chat-hf/1",
    ),
}

OTHER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("meta-llama/Llama-3.1-8B-Instruct",): (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/Llama-3.8B-Instruct",
        "meta-llama/Llama-3.2-8B-Instruct",
        "meta-llama/Llama-3.1-70B-Instruct",
        "meta-llama/Llama-Guard-3-8B",
        "NousResearch/Hermes-3-Llama-3.1-8B",
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "unsloth/DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit",
        "mlabonne/Meta-Llama-3.1-8B-Instruct-abliterated",
        "someone/Llama-3.1-8B-Instruct-bnb-4bit-dpo",
        "gradientai/Llama-3.1-8B-Instruct-262k",
        "nvidia/Llama-3.1-8B-UltraLong-1M-Instruct",
        "/kaggle/input/llama-3/transformers/8b-chat-hf/1",
        "/kaggle/input/llama-3.1/transformers/8b-instruct",
        "/root/autodl-tmp/output/checkpoint-500",
        "/models/final/",
        "/",
        "   ",
        "@main",
        "0123456789abcdef0123456789abcdef01234567",
        "/cache/snapshots/f0123456789abcdef0123456789abcdef0123456",
    ),
    ("meta-llama/Llama-2-7b-hf",): (
        "meta-llama/Llama-2-7b-chat-hf",
        "huggyllama/llama-7b",
        "lmsys/vicuna-7b-v1.5",
        "codellama/CodeLlama-7b-hf",
        "togethercomputer/LLaMA-2-7B-32K",
        "TheBloke/Llama-2-7B-Chat-AWQ",
    ),
    ("Qwen/Qwen2.5-7B-Instruct",): (
        "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2-7B-Instruct",
        "Qwen/Qwen2.5-Coder-7B-Instruct",
        "Qwen/Qwen2.5-Math-7B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "Qwen/Qwen2.5-14B-Instruct",
    ),
    ("mistralai/Mistral-7B-v0.1",): (
        "mistralai/Mistral-7B-v0.2",
        "mistralai/Mistral-7B-v0.3",
        "mistralai/Mistral-7B-Instruct-v0.1",
        "HuggingFaceH4/zephyr-7b-beta",
        "teknium/OpenHermes-2.5-Mistral-7B",
        "/models/mistral",
    ),
    ("microsoft/phi-2",): ("microsoft/phi-1-shards-2", "x/phi-2gb", "x/phi-4-2gb-shards"),
    ("microsoft/phi",): ("microsoft/phi-2-shards", "x/phi-2gb", "x/phi-2-sharded-bf16-5gb"),
    ("google/gemma-2b",): (
        "google/gemma-2b-it-colab",
        "x/gemma-2b-colab-dolly",
        "x/colab",
        "x/copy",
    ),
    ("Qwen/Qwen3-8B",): ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-4B-Instruct-2507"),
    ("google/gemma-2-2b-it",): ("google/gemma-2-2b", "google/gemma-2.2b-it"),
    # What folders of any model are called names no model.
    ("/srv/latest", "/srv/7b"): ("/home/me/latest", "/other/7b"),
    ("/kaggle/input/llama-3/transformers/8b-chat-hf/1",): ("/kaggle/input/gemma/1", "1"),
}


def _pairs(table: dict[tuple[str, ...], tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    return [(known, name) for known, names in table.items() for name in names]


@pytest.mark.parametrize(("known", "name"), _pairs(SAME))
def test_another_name_of_the_same_model_is_accepted(known: tuple[str, ...], name: str) -> None:
    assert names_base(name, known)


@pytest.mark.parametrize(("known", "name"), _pairs(OTHER))
def test_another_model_is_refused(known: tuple[str, ...], name: str) -> None:
    assert not names_base(name, known)


def test_the_table_is_large_enough() -> None:
    assert len(_pairs(SAME)) >= 30
    assert len(_pairs(OTHER)) >= 30


@given(st.text() | st.text("aB3_-./@\\ :m") | st.sampled_from([n for _, n in _pairs(SAME)]))
def test_normal_names_are_their_own_normal_names(name: str) -> None:
    normal = normal_name(name)
    assert normal_name(normal) == normal


MARKS = (
    "-sharded",
    "-colab",
    "-bnb-4bit",
    "-unsloth",
    "-GPTQ-Int4",
    "-AWQ",
    "_FP8",
    ".w8a8",
    "-FP8-Dynamic",
    "-hf",
)


@given(st.permutations(MARKS), st.integers(0, len(MARKS)))
def test_marks_come_off_in_any_order(marks: list[str], count: int) -> None:
    assert normal_name("org/Qwen2.5-7B-Instruct" + "".join(marks[:count])) == "qwen-2-5-7b-instruct"


def test_marks_within_a_name_stay() -> None:
    for first, second in permutations(("-awq", "-chat"), 2):
        name = f"llama-2-7b{first}{second}"
        assert names_base(name, ("llama-2-7b-chat",)) is (second == "-awq")
