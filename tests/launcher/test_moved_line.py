"""Command lines of vLLM, SGLang and LoRAX, as `loraplex serve` takes them."""

import json

import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.command_line import flags_of
from loraplex.launcher.config import serve_options
from loraplex.launcher.moved_line import Moved, move
from loraplex.launcher.options import OptionError


def moved(*words: str) -> Moved:
    return move(words, flags_of(serve_options()))


CONTAINER = (
    *("--port=8080", "--model=/mnt/models", "--served-model-name=llama", "--enable-lora"),
    *("--lora-modules", "sql=/mnt/lora/sql"),
)
LORA = {"name": "b", "path": "/b", "base_model_name": "base"}
SGLANG = {"lora_name": "c", "lora_path": "/c", "pinned": False}
# What was written, and what our parser reads.
LINES: list[tuple[tuple[str, ...], str]] = [
    (CONTAINER, "/mnt/models --port=8080 --model-name=llama --adapter=sql=/mnt/lora/sql"),
    (("m", "--served-model-name", "a", "b", "--tp", "2"), "m --model-name=a --model-name=b --tp=2"),
    (("--lora-modules", "a=/a", json.dumps(LORA)), "--adapter=a=/a --adapter=b=/b"),
    (("--lora-paths", json.dumps([SGLANG]), "--host", "h"), "--adapter=c=/c --host=h"),
    (("--max_lora_rank", "64", "--adapter_slots=4"), "--max-lora-rank=64 --adapter-slots=4"),
    (("--max-model-len", "32k"), "--max-context=32000"),
    (("--max-model-len=32K", "--max-num-batched-tokens=1.5k"), "--max-context=32768 "
     "--max-step-tokens=1500"),
    (("--max-model-len", "-1", "--chunked-prefill-size", "-1", "m"), "m"),
    (("--model-path", "m", "--tp-size", "2", "--dp", "3"), "m --tp=2 --workers=3"),
    (("--enable-lora", "m"), "m"),
    (("--no-enable-prefix-caching", "m", "-O3", "--seed", "7"), "m"),
    (("--dtype", "half", "--kv-cache-dtype", "fp8_e4m3"), "--dtype=float16 --kv-dtype=fp8"),
    (("--dtype=bfloat16", "-q", "fp8"), "--dtype=bfloat16 --quantize=fp8"),
    (("--quantization", "bitsandbytes"), "--quantize=nf4"),
    (("--quantization", "awq_marlin", "--gpu-memory-utilization", "0.8"),
     "--gpu-memory-utilization=0.8"),
    (("--enable-log-requests",), "--log-requests=yes"),
    (("--enable-deterministic-inference", "m"), "--batch-invariant m"),
    (("--no-enable-log-requests", "--json-output"), "--log-format=json"),
    (("--allowed-origins", '["*"]'), "--cors-origin=*"),
    (("--speculative-config.method", "ngram", "--port", "1"), "--port=1"),
    (("--cuda-graph-bs", "1", "2", "--trust-remote-code", "m"), "m"),
    (("--pipeline-parallel-size", "1", "--cpu-offload-gb=0", "--no-enable-sleep-mode"), ""),
    (("--load-format", "auto", "--share-hub-token", "m"), "--share-hub-token m"),
    (("--frobnicate", "x", "--adaptr=y"), "--frobnicate x --adaptr=y"),
    (("--abcmodel=m", "--no-one", "x"), "--abcmodel=m --no-one x"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "ours"), LINES)
def test_a_line_of_another_server_is_ours(words: tuple[str, ...], ours: str) -> None:
    assert moved(*words).words == ours.split()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--enable-lora",), "--enable-lora has no effect here: adapters are always on"),
        (("--max-loras", "4"), "--adapter-slots and --adapter-memory bound"),
        (("--max_cpu_loras=16",), "--host-adapter-memory"),
        (("--tool-call-parser", "hermes"), "--tool-format and --reasoning-format"),
        (("--disable-radix-cache",), "--disable-radix-cache has no effect"),
        (("--mm-encoder-tp-mode", "data"), "the model's own files say how images are read"),
        (("--swap-space", "4"), "keep keys and values below the device"),
    ],
)
def test_what_has_no_effect_is_said_once(words: tuple[str, ...], says: str) -> None:
    (note,) = moved("m", *words).notes
    assert says in note


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--chat-template", "t"), "--chat-template: write it as chat_template.jinja"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size: say --tp, --workers"),
        (("--num-gpu-blocks-override=9",), "--kv-memory, in bytes"),
        (("--hf-token", "secret"), "set HF_TOKEN"),
        (("--load-format", "gguf"), "--load-format: weights are read from safetensors"),
        (("--mm-processor-kwargs", '{"max_pixels": 9}'), "change the model's preprocessor_config"),
        (("--config", "f.yaml"), "--config: write its options as flags"),
        (("--enable-sleep-mode",), "--enable-sleep-mode: there is no such"),
        (("--lora-modules", '{"name": "a"}'), "--lora-modules: expected name and path"),
        (("--lora-paths", json.dumps({**SGLANG, "pinned": True})), "see --adapters-file"),
        (("--lora-modules", "{"), "--lora-modules: Expecting"),
        (("--max-model-len",), "--max-model-len needs a value"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(OptionError) as refused:
        moved("m", *words)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_variable_and_keys_are_no_words() -> None:
    found = moved("m", "--download-dir", "/models", "--api-key", "k1", "k2", "--api_key=k3")
    assert (found.words, found.environ) == (["m"], {"HF_HUB_CACHE": "/models"})
    assert found.api_keys == ["k1", "k2", "k3"]


def test_own_lines_are_not_of_another_server() -> None:
    assert not moved(
        "m", "--dtype=float32", "--max-context", "4", "--no-share-hub-token"
    ).is_foreign
    assert moved("--max-model-len", "4").is_foreign


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "--max-num-seqs", "4"), "MODEL is needed beside options of other servers"),
        (("serve", "m", "--api-key=sk-1", "--auth", "none"), "--auth none: drop one"),
        (("serve", "m", "--max-model-len=4", "--api-kye", "sk-1"), "arguments: --api-kye"),
        (("router", "--api-key", "sk-1"), "unrecognized arguments: --api-key"),
        (("info", "--api-key=sk-1"), "unrecognized arguments: --api-key"),
        (("serve", "a", "--model", "b"), "unrecognized arguments: a"),
        (("serve", "m", "--kv-cache-dtype", "int4"), "--kv-dtype must be one of auto, fp8"),
    ],
)
def test_a_failed_start_says_what_and_no_key(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert "sk-1" not in said
