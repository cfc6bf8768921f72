"""Which file of a folder is taken, and what else a folder may be: by names alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.launcher.convert.formats import Listing, beside, choose_weights, form_of, refuse_ready
from tests.adapters.refusals import refusal

_LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (("adapters.safetensors", "adapter_config.json"), "adapters.safetensors"),
        (("0000100_adapters.safetensors", "adapters.safetensors"), "adapters.safetensors"),
        (("adapter_model.bin", "training_args.bin", "optimizer.pt"), "adapter_model.bin"),
        (("adapter_model.bin", "adapter_model.safetensors"), "adapter_model.safetensors"),
        (("lora.pt", "rng_state_0.pth", "scheduler.pt", "mp_rank_00_model_states.pt"), "lora.pt"),
        (("mine.safetensors", "README.md"), "mine.safetensors"),
        (("pytorch_model.bin", "lora.pth"), "lora.pth"),
        (("model_lora.pt",), "model_lora.pt"),
    ],
)
def test_the_file_that_is_taken(files: tuple[str, ...], chosen: str) -> None:
    assert choose_weights(Listing(files)) == chosen


@pytest.mark.parametrize(
    ("files", "folders", "words"),
    [
        ((), (), "no weights"),
        (("adapter_config.json", "training_args.bin"), (), "no weights"),
        (("a.pt", "b.pt"), (), "'a.pt', 'b.pt': choose with --weights"),
        (("0000100_adapters.safetensors",), (), "0000100_adapters.safetensors.*--weights"),
        (("adapter_model-00001-of-00002.bin", "adapter_model.bin.index.json"), (), "several files"),
        (("ggml-adapter-model.bin.gguf",), (), "llama.cpp"),
        (("lora.GGUF",), (), "llama.cpp"),
        (("ggml-adapter-model.bin",), (), "llama.cpp"),
        (("adapter_model-00001-of-00002.safetensors",), (), "served as they are"),
        (("adapter_model.safetensors.index.json",), (), "served as they are"),
        (("\x1b[31m.bin",), (), "plain name"),
        (("adapters.npz",), (), "mlx's format before April 2024"),
        (("model-00001-of-00002.safetensors", "model.safetensors.index.json"), (), "whole model"),
        (("pytorch_model.bin", "config.json"), (), "whole model"),
        (("consolidated.00.pth",), (), "whole model"),
        ((), ("checkpoint-10", "checkpoint-20"), "mean ./checkpoint-20 or ./checkpoint-10"),
        ((), tuple(f"c{i:02}" for i in range(20)), "./c03 .and 16 more"),
        (tuple(f"c{i:02}.pt" for i in range(20)), (), "'c07.pt' and 12 more"),
    ],
)
def test_refused_folders(files: tuple[str, ...], folders: tuple[str, ...], words: str) -> None:
    with pytest.raises(AdapterError, match=words) as refused:
        choose_weights(Listing(files, folders))
    assert refused.value.message.isprintable()


def test_the_file_that_the_user_names() -> None:
    files = ("adapters.safetensors", "0000100_adapters.safetensors", "training_args.bin")
    listing = Listing(files)
    assert choose_weights(listing, files[1]) == files[1]
    assert (
        beside(listing, files[1])
        == "not used: 'adapters.safetensors'; --weights FILE takes another"
    )
    assert beside(Listing(files[:1]), files[0]) is None
    with pytest.raises(AdapterError, match="no such file"):
        choose_weights(listing, "../adapters.safetensors")


@pytest.mark.parametrize(
    ("names", "form"),
    [
        ((f"{_LAYER}.lora_a", f"{_LAYER}.lora_b"), "mlx-lm"),
        ((f"{_LAYER}.lora_a", f"{_LAYER}.m"), "mlx-lm"),
        ((f"base_model.model.{_LAYER}.lora_A.weight",), "PEFT"),
        ((f"base_model.model.{_LAYER}.lora_A.default.weight",), "PEFT"),
        (("base_model.model.model.embed_tokens.lora_embedding_A",), "PEFT"),
        ((f"{_LAYER}.lora_A.weight",), "PEFT"),
        (("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight",), "PEFT"),
    ],
)
def test_forms(names: tuple[str, ...], form: str) -> None:
    assert form_of(names) == form


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", "images"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", "images"),
        ("unet.down_blocks.0.attentions.0.to_k.lora_A.weight", "images"),
        ("transformer.transformer_blocks.0.attn.to_k.lora_A.weight", "images"),
        ("text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight", "images"),
        (f"{_LAYER}.hada_w1_a", "LoHa"),
        ("layers.0.attn.q_proj.lora_a.weight", "torchtune"),
        ("transformer.h.0.attn.qkv.lora_A", "litgpt"),
        ("prompt_embeddings", "another method of PEFT"),
        (f"{_LAYER}.weight", "whole model"),
        ("transformer.h.0.attn.c_attn.weight", "whole model"),
        ("x", "no LoRA tensors but 'x'"),
    ],
)
def test_refused_tensors(name: str, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        form_of((name,))


def test_no_tensors() -> None:
    with pytest.raises(AdapterError, match="no tensors"):
        form_of(())


def test_what_is_ready_is_not_converted() -> None:
    with pytest.raises(AdapterError, match="nothing to convert"):
        refuse_ready("adapter_model.safetensors", "PEFT", {"peft_type": "LORA"})
    refuse_ready("adapter_model.bin", "PEFT", {"peft_type": "LORA"})
    refuse_ready("adapter_model.safetensors", "mlx-lm", {"lora_parameters": {}})


@given(st.lists(st.text(max_size=30), max_size=8), st.lists(st.text(max_size=30), max_size=8))
def test_any_names_are_chosen_or_refused_in_print(files: list[str], names: list[str]) -> None:
    for call in (lambda: choose_weights(Listing(files)), lambda: form_of(names)):
        error = refusal(call)
        assert error is None or (error.message.isprintable() and error.message.isascii())
