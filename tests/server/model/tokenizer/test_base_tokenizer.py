"""The base's tokenizer is that which transformers makes of the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from loraplex.server.model.checkpoint.checkpoint import CheckpointError
from loraplex.server.model.tokenizer.base_tokenizer import read_tokenizer, special_token_settings

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEXT = "<s>a  <|im_start|>user  <|im_end|> b</s> <tool>c"
NEW = {"content": "<|im_start|>", "special": True}
STRIPS = {"content": "<|im_end|>", "special": True, "lstrip": True, "rstrip": True}


def save(folder: Path, files: dict[str, Any], *, known: bool = True) -> None:
    """A tokenizer of bytes, `<s>` and `</s>`. known: its file lists these as added."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*letters, "<s>", "</s>"]
    library = Tokenizer(BPE({text: at for at, text in enumerate(texts)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if known:
        library.add_special_tokens([AddedToken("<s>", special=True), "</s>"])
    library.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


FILES: list[dict[str, Any]] = [
    {},
    {CONFIG: {"added_tokens_decoder": {"258": NEW, "259": STRIPS}, "eos_token": "<|im_end|>"}},
    {CONFIG: {"added_tokens_decoder": {"259": STRIPS, "258": NEW}}},
    {CONFIG: {"added_tokens_decoder": {"257": {"content": "</s>", "rstrip": True}}}},
    {
        CONFIG: {"added_tokens_decoder": {}, "bos_token": "<|im_start|>"},
        MAP: {"eos_token": "<tool>"},
    },
    {ADDED: {"<|im_end|>": 259, "<|im_start|>": 258}, CONFIG: {"eos_token": "<|im_end|>"}},
    {
        CONFIG: {"eos_token": "<tool>"},
        MAP: {"eos_token": {"content": "<|im_end|>", "lstrip": True}},
    },
    {CONFIG: {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}},
    {MAP: {"additional_special_tokens": ["<|im_start|>"], "pad_token": "<tool>"}},
    {CONFIG: {"extra_special_tokens": ["<tool>", "<s>"]}},
    {CONFIG: {"additional_special_tokens": ["<a>"], "extra_special_tokens": ["<tool>"]}},
    {CONFIG: {"additional_special_tokens": ["<a>"], "extra_special_tokens": {"b_token": "<b>"}}},
    {
        CONFIG: {"additional_special_tokens": ["<|im_start|>"]},
        MAP: {"additional_special_tokens": ["<tool>"]},
    },
    {CONFIG: {"extra_special_tokens": {"call_token": "<tool>"}, "unk_token": None}},
    {CONFIG: {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}},
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("files", FILES)
def test_tokens_are_those_of_transformers(
    files: dict[str, Any], known: bool, tmp_path: Path
) -> None:
    save(tmp_path, files, known=known)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours, text = read_tokenizer(tmp_path)
    for tokenizer in (ours, Tokenizer.from_str(text)):
        assert tokenizer.get_vocab(with_added_tokens=True) == theirs.get_vocab()
        assert tokenizer.encode(TEXT).ids == theirs.encode(TEXT)
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        assert special == {t.content for t in theirs.added_tokens_decoder.values() if t.special}


def test_a_file_that_tells_nothing_new_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, {CONFIG: {"bos_token": "<s>", "eos_token": "</s>"}})
    assert read_tokenizer(tmp_path)[1] == (tmp_path / "tokenizer.json").read_text()


def test_the_map_counts_where_no_added_tokens_are_listed(tmp_path: Path) -> None:
    save(tmp_path, {CONFIG: {"eos_token": "new"}, MAP: {"eos_token": "old"}})
    assert special_token_settings(tmp_path)["eos_token"] == "old"
    save(tmp_path, {CONFIG: {"eos_token": "new", "added_tokens_decoder": {}}})
    assert special_token_settings(tmp_path)["eos_token"] == "new"


@pytest.mark.parametrize(
    "files",
    [
        {CONFIG: {"added_tokens_decoder": {"x": NEW}}},
        {CONFIG: {"added_tokens_decoder": {"258": {"special": True}}}},
        {CONFIG: {"added_tokens_decoder": []}},
        {CONFIG: {"additional_special_tokens": [3]}},
        {ADDED: {"<tool>": "x"}},
        {ADDED: {"<tool>": None}},
    ],
)
def test_entries_that_are_no_tokens_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, files)
    with pytest.raises(CheckpointError):
        read_tokenizer(tmp_path)
