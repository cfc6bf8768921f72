"""The model's folder: digest, what fits, what is refused, and the card."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from loraplex.adapters.safetensors.floats import float_digest
from loraplex.server.model.card import model_card, read_base_spec
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, base_digest, read_config
from loraplex.server.model.weights import load_weights
from loraplex.server.protocol import ModelCard
from tests.server.model.hub_models import make_model, save_model
from tests.server.worker.worker_process import NO_WORDS

CPU = torch.device("cpu")
WINDOWS = {
    "model_type": "qwen2",
    "architectures": None,
    "use_sliding_window": True,
    "sliding_window": 8,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(make_model("llama3"), tmp_path / "model")


def load(folder: Path) -> None:
    load_weights(folder, read_config(folder), torch.float32, CPU)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}))


def test_digest_is_of_content_not_of_place(folder: Path, tmp_path: Path) -> None:
    digest = base_digest(folder)
    assert len(digest) == 64
    moved = tmp_path / "copy"
    shutil.copytree(folder, moved)
    edit_json(moved / "config.json", transformers_version="9.9", _name_or_path="/elsewhere")
    (moved / "README.md").write_text("hello")
    assert base_digest(moved) == digest


def test_digest_tells_fine_tunes_apart(folder: Path, tmp_path: Path) -> None:
    digest = base_digest(folder)
    other = save_model(make_model("llama3", seed=1), tmp_path / "other")
    sharded = save_model(make_model("llama3"), tmp_path / "sharded", max_shard_size="100KB")
    edit_json(folder / "config.json", rms_norm_eps=1e-5)
    assert len({digest, base_digest(other), base_digest(sharded), base_digest(folder)}) == 4


def test_missing_unexpected_and_wrong_at_once(folder: Path) -> None:
    rewrite(
        folder,
        **{
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.self_attn.q_proj.bias": torch.zeros(64),
            "model.norm.weight": torch.zeros(63),
            "lm_head.weight": torch.zeros(97, 64, dtype=torch.int8),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    text = str(caught.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in text
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in text
    assert "model.norm.weight (expected [64], got F32 [63])" in text
    assert "lm_head.weight (expected [97, 64], got I8 [97, 64])" in text
    assert "inv_freq" not in text


def test_tied_head_may_be_stored_alone(tmp_path: Path) -> None:
    folder = save_model(make_model("llama-biases-tied"), tmp_path)
    before = read_base_spec(folder, ()).embedding_digests
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    assert read_base_spec(folder, ()).embedding_digests == before
    weights = load_weights(folder, read_config(folder), torch.float32, CPU)
    assert weights.lm_head.weight is weights.embed
    assert torch.equal(weights.embed, stored["lm_head.weight"].float())


def test_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    folder = save_model(make_model("llama-biases-tied"), tmp_path)
    alone = read_base_spec(folder, ()).embedding_digests
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].double()
    rewrite(folder, **{"lm_head.weight": head})
    assert read_base_spec(folder, ()).embedding_digests == alone
    weights = load_weights(folder, read_config(folder), torch.float32, CPU)
    assert weights.lm_head.weight is weights.embed
    head[96, 63] += 1
    rewrite(folder, **{"lm_head.weight": head})
    with pytest.raises(CheckpointError, match=r"different lm_head\.weight.*tie_word_embeddings"):
        read_base_spec(folder, ())
    edit_json(folder / "config.json", tie_word_embeddings=False)
    untied = read_base_spec(folder, ()).embedding_digests
    assert untied["lm_head"] != untied["embed_tokens"] == alone["embed_tokens"]


def test_a_reader_hears_how_much_was_read(folder: Path) -> None:
    heard: list[tuple[float, float, str]] = []
    model = read_config(folder)
    load_weights(folder, model, torch.float32, CPU, read=lambda *read: heard.append(read))
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    parts = [index / model.num_layers for index in range(model.num_layers)]
    assert heard == [(total / 2**30 * part, total / 2**30, "GiB") for part in parts]


def test_weights_are_cast(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    weights = load_weights(folder, read_config(folder), torch.bfloat16, CPU)
    assert weights.layers[2].attention.qkv.dequantised().dtype == torch.bfloat16
    assert torch.equal(weights.norm.weight, stored.to(torch.bfloat16))


def test_bin_is_refused_and_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*safetensors"):
        base_digest(folder)


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": "../secret.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "model.bin"},
        {},
        {"a": "no.safetensors"},
    ],
)
def test_index_names_files_of_the_folder_only(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError):
        base_digest(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    """Whatever the index says: readers of other projects take the one or the other."""
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name]}, folder / "second.safetensors")
    weight_map = {**dict.fromkeys(tensors, "model.safetensors"), name: "second.safetensors"}
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(CheckpointError, match=f"second.safetensors: {name} lies in model.safe"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, -4])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 97 * 64 * 4 - 2]},
        {"data_offsets": [0.0, 97 * 64 * 4.0]},
        {"shape": [97, 63]},
        {"dtype": "F64"},
    ],
)
def test_a_span_that_is_not_its_tensors(folder: Path, change: dict[str, Any]) -> None:
    header = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [97, 64]}}
    header["model.embed_tokens.weight"] |= {"data_offsets": [0, 97 * 64 * 4], **change}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(97 * 64 * 8)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="malformed safetensors header"):
        read_base_spec(folder, ())


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": 5},
        {"auto_map": 5},
        {**WINDOWS, "layer_types": 5},
        {**WINDOWS, "layer_types": [["full_attention"]] * 3},
        {**WINDOWS, "max_window_layers": "x"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": "1", "mscale_all_dim": 1}},
        {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
    ],
)
def test_entries_of_other_types(folder: Path, change: dict[str, Any]) -> None:
    edit_json(folder / "config.json", **change)
    with pytest.raises(CheckpointError, match="config.json"):
        read_config(folder)


@pytest.mark.parametrize("text", ["{", "[]", "nul", '{"model_type": "bert"}'])
def test_malformed_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        read_config(folder)


def test_not_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config.json"):
        read_config(tmp_path)


def card(folder: Path, max_context: int | None = None) -> ModelCard:
    return model_card(
        folder,
        names=("demo",),
        dtype="float32",
        device="cpu",
        max_lora_rank=64,
        max_context=max_context,
    )


def test_card(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(NO_WORDS)
    edit_json(
        folder / "tokenizer_config.json",
        chat_template="config",
        bos_token={"content": "<s>", "lstrip": False},
        eos_token="</s>",
        pad_token=None,
    )
    edit_json(folder / "special_tokens_map.json", unk_token={"content": "<unk>"}, eos_token="old")
    edit_json(folder / "generation_config.json", do_sample=True, temperature=0.6, top_k=20, n=3)
    found = card(folder)
    assert found.base_digest == base_digest(folder)
    words = Tokenizer.from_str(found.tokenizer_json).get_vocab()
    assert words == {"<s>": 0, "old": 1, "<unk>": 2}
    assert found.chat_template == "config"
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "old", "unk_token": "<unk>"}
    assert found.eos_token_ids == (2, 1)  # of config.json, and `old`
    assert (found.vocab_size, found.max_context) == (97, 256)
    assert found.sampling_defaults == {"temperature": 0.6, "top_k": 20.0}
    assert card(folder, max_context=64).max_context == 64
    assert not found.split_special_tokens
    edit_json(folder / "tokenizer_config.json", split_special_tokens=True)
    assert card(folder).split_special_tokens
    extra = {"sep_token": "<sep>", "extra_special_tokens": {"call": {"content": "<call>"}}}
    edit_json(folder / "tokenizer_config.json", image_token="<image>", unk_token=None, **extra)
    assert card(folder).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "old",
        "unk_token": "<unk>",
        "sep_token": "<sep>",
        "image_token": "<image>",
        "call": "<call>",
    }
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    assert card(folder).chat_template == "d"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert card(folder).chat_template == "d"
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    assert card(folder).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert card(folder).chat_template == "jinja"


def test_a_special_token_that_is_none_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(NO_WORDS)
    edit_json(folder / "tokenizer_config.json", eos_token=["</s>"])
    with pytest.raises(CheckpointError, match=r"special token 'eos_token'.*\['</s>'\]"):
        card(folder)


@pytest.mark.parametrize(
    ("advice", "says"),
    [
        ({"top_p": 0.0}, "top_p must be more than 0, at most 1: 0.0"),
        ({"min_p": 2}, "min_p must be at least 0, at most 1: 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.001"),
        ({"top_k": 10**40}, "top_k must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
    ],
)
def test_advice_by_which_nothing_could_be_drawn(
    folder: Path, advice: dict[str, float], says: str
) -> None:
    (folder / "tokenizer.json").write_text(NO_WORDS)
    edit_json(folder / "generation_config.json", do_sample=True, **advice)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {says}"):
        card(folder)


def test_slow_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        card(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "Model missing"),
        ("version https://git-lfs.github.com/spec/v1", "expected value"),
        (NO_WORDS.replace("{", '{"version": "9.0", ', 1), "Unknown tokenizer version '9.0'"),
        (NO_WORDS.replace("BPE", "Newer"), "did not match"),
        ('{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}}', "Missing"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(folder: Path, text: str, says: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .* cannot use it \(.*{says}"):
        card(folder)


def test_base_facts(folder: Path, tmp_path: Path) -> None:
    """An embedding that PEFT saves beside an adapter is known as the base's own, in any dtype."""
    base = read_base_spec(folder, ("demo", "org/demo"))
    assert (base.digest, base.names) == (base_digest(folder), ("demo", "org/demo"))
    assert base.tokens is None
    for short, name in (
        ("embed_tokens", "model.embed_tokens.weight"),
        ("lm_head", "lm_head.weight"),
    ):
        stored = load_file(folder / "model.safetensors")[name]
        raw = stored.double().numpy().view("u1").reshape(-1)
        assert base.embedding_digests[short] == float_digest(raw, "F64")
    assert base.embedding_digests["embed_tokens"] != base.embedding_digests["lm_head"]
    tied = read_base_spec(save_model(make_model("llama-biases-tied"), tmp_path / "tied"), ())
    assert tied.embedding_digests["embed_tokens"] == tied.embedding_digests["lm_head"]
