"""Token ids of real vocabularies are AutoTokenizer's, whatever class the files name."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from loraplex.adapters.peft.files import special_tokens
from loraplex.server.model.checkpoint.checkpoint import CheckpointError
from loraplex.server.model.tokenizer.base_tokenizer import read_tokenizer, special_token_settings
from loraplex.server.model.tokenizer.tokenizer_class import REBUILT, rebuilt_class
from tests import vocabularies
from tests.router.text import small_models

_EDGES = ("", " ", "  ", "\n", "\t", "\r\n", "<s>", "<s> ", "</s>", "<|user|>", "<|user|>\n", "▁")
_BODIES = (
    "",
    "a",
    " a",
    "  two  spaces",
    "Grüße 你好🙂\u0301",
    "12 345",
    "x</s> y<|user|> z",
    "it's",
)
PROMPTS = sorted({edge + body for edge, body in itertools.product(_EDGES, _BODIES)})
USER = {"content": "<|user|>", "special": False, "normalized": False}
SPECIAL = {"special": True, "normalized": False}
LISTED = {
    "0": {"content": "<unk>", **SPECIAL},
    "1": {"content": "<s>", **SPECIAL},
    "2": {"content": "</s>", **SPECIAL, "rstrip": True},
    "32000": USER,
}

# Of a SentencePiece vocabulary: model_type, and tokenizer_config.json.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tokenizer_class": "LlamaTokenizer"}),
    ("llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": None}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True, "legacy": True}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": None}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": LISTED}),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|user|>", "unk_token": None}),
    ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "legacy": False}),
    ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True}),
    ("llama", {"tokenizer_class": "TokenizersBackend", "added_tokens_decoder": LISTED}),
    ("llama", {"tokenizer_class": "CodeLlamaTokenizer", "added_tokens_decoder": LISTED}),
    ("llama", {"tokenizer_class": "NoSuchTokenizer"}),
    ("llama", {"tokenizer_class": "Phi3Tokenizer"}),
    ("mistral", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    ("mistral", {}),
    ("mixtral", {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": True}),
    ("phi3", {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": LISTED}),
    ("qwen3", {"tokenizer_class": "LlamaTokenizer"}),
    ("gemma", {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>"}),
    ("gemma2", {}),
]
# Of a byte-level vocabulary.
BYTE_LEVEL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tokenizer_class": "LlamaTokenizerFast"}),
    ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}),
    ("llama", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    ("qwen2", {}),
    ("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}),
    ("qwen2", {"tokenizer_class": "LlamaTokenizerFast"}),
    ("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": ["<|user|>", "<a>"]}),
    ("qwen3", {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "</s>"}),
    ("qwen3_5", {}),
    ("gpt2", {}),
    ("gpt2", {"tokenizer_class": "GPT2TokenizerFast", "add_bos_token": True}),
    ("phi", {"tokenizer_class": "CodeGenTokenizer"}),
    ("llama", {"tokenizer_class": "CodeGenTokenizerFast", "add_prefix_space": True}),
    ("starcoder2", {"tokenizer_class": "GPT2Tokenizer"}),
    ("gpt_neox", {"tokenizer_class": "GPTNeoXTokenizerFast", "add_bos_token": True}),
    ("stablelm", {"tokenizer_class": "GPTNeoXTokenizerFast"}),
    ("granite", {"tokenizer_class": "GPT2Tokenizer"}),
    ("cohere", {"tokenizer_class": "CohereTokenizerFast"}),
    ("olmo2", {"tokenizer_class": "GPT2Tokenizer"}),
]


def save(folder: Path, tokenizer_json: str, model_type: str, settings: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def check(folder: Path) -> None:
    theirs = cast(Any, AutoTokenizer).from_pretrained(folder)
    ours = Tokenizer.from_str(read_tokenizer(folder)[1])
    ours.no_padding()
    assert ours.get_vocab(with_added_tokens=True) == theirs.get_vocab()
    for special in (True, False):
        expected = theirs(PROMPTS, add_special_tokens=special)["input_ids"]
        found = [e.ids for e in ours.encode_batch(PROMPTS, add_special_tokens=special)]
        assert dict(zip(PROMPTS, found, strict=True)) == dict(zip(PROMPTS, expected, strict=True))
    assert ours.decode_batch(found) == theirs.backend_tokenizer.decode_batch(found)
    named = {key: text for key, text in special_texts(folder).items() if text is not None}
    assert named == theirs.special_tokens_map


def special_texts(folder: Path) -> dict[str, str | None]:
    return special_tokens(special_token_settings(folder))


def test_there_are_enough_prompts() -> None:
    assert len(PROMPTS) >= 64


def first_of_a_kind(listed: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Rows with a class or a setting that no row before has; others are long. What a model type's
    class is has a test of its own."""
    seen, rows = set[str](), []
    for model_type, settings in listed:
        kinds = {settings.get("tokenizer_class", model_type), *settings}
        marks = [pytest.mark.exhaustive] if kinds <= seen else []
        rows.append(pytest.param(model_type, settings, marks=marks))
        seen |= kinds
    return rows


@pytest.mark.parametrize(("model_type", "settings"), first_of_a_kind(SETTINGS), ids=repr)
def test_sentence_piece(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, vocabularies.load("llama-2"), model_type, settings)
    check(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model_type", "settings"), SETTINGS, ids=repr)
@pytest.mark.parametrize("vocabulary", ["llama-2-new", "mistral-v1", "mistral-v2", "mistral-v7"])
def test_sentence_piece_of_others(
    vocabulary: str, model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path, vocabularies.load(vocabulary), model_type, settings)
    check(tmp_path)


@pytest.mark.parametrize(("model_type", "settings"), first_of_a_kind(BYTE_LEVEL), ids=repr)
def test_byte_level(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, small_models.byte_level().to_str(), model_type, settings)
    check(tmp_path)


def test_gemma(tmp_path: Path) -> None:
    save(tmp_path, vocabularies.load("llama-2-gemma"), "gemma2", {"bos_token": "<s>"})
    check(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("opt", {"add_bos_token": True, "bos_token": "</s>", "pad_token": "<pad>"}),
        ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
        ("llama", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": 1, "add_eos_token": True}),
        ("qwen2", {"additional_special_tokens": ["<|user|>"], "eos_token": "<|im_end|>"}),
    ],
    ids=repr,
)
def test_a_vocabulary_and_merges(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    library = small_models.byte_level()
    save(tmp_path, library.to_str(), model_type, settings)
    library.model.save(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    check(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma", {}),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}),
        ("llama", {"tokenizer_class": "LlamaTokenizer", "pad_token": None}),
        ("qwen2", {"pad_token": "<|im_end|>"}),
        ("qwen2", {}),
        ("mistral", {}),
        ("mistral", {"pad_token": None}),
    ],
    ids=repr,
)
def test_the_file_names_what_pads(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    sentence_piece = model_type in ("gemma", "llama")
    library = small_models.new_form() if sentence_piece else small_models.byte_level()
    library.enable_padding(pad_id=9, pad_token="<|fills|>")
    save(tmp_path, library.to_str(), model_type, settings)
    check(tmp_path)


def test_a_vocabulary_and_merges_of_another_class_are_refused(tmp_path: Path) -> None:
    small_models.byte_level().model.save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="no tokenizer.json, which its class needs"):
        read_tokenizer(tmp_path)


def test_a_refusal_has_the_command_that_makes_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "it's one's own"
    folder.mkdir()
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b")
    (folder / "vocab.txt").write_text("\n".join(words))
    named = {f"{word[1:-1].lower()}_token": word for word in words[:5]}
    settings = {"tokenizer_class": "BertTokenizer", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(CheckpointError, match="this command makes the file: ") as refused:
        read_tokenizer(folder)
    command = str(refused.value).partition("this command makes the file: ")[2]
    *_, python, option, code = shlex.split(command)
    assert (python, option) == ("python", "-c")
    exec(code, {})
    check(folder)


def test_model_types_are_registered_as_in_transformers() -> None:
    runs_as_it_stands = ("TokenizersBackend", "MistralCommonBackend")
    compared = 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        registered = (TOKENIZER_MAPPING_NAMES.get(model_type) or "").removesuffix("Fast")
        if registered not in (*runs_as_it_stands, "", *REBUILT):
            continue  # of no language model that is served
        compared += 1
        default = rebuilt_class(model_type, None, byte_level=True)
        assert default == REBUILT.get(registered), model_type
        expected: str | None = "GemmaTokenizer"
        if registered in runs_as_it_stands:
            expected = None
        elif model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            expected = registered
        named = rebuilt_class(model_type, "GemmaTokenizer", byte_level=True)
        assert named == expected, model_type
    assert compared > 100
