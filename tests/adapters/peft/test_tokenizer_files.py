"""Tokenizer files that say nothing new are accepted; the adapter's template is found."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from loraplex.adapters.errors import Findings
from loraplex.adapters.manifest import AdapterTemplate, OwnToken
from loraplex.adapters.peft.files import MAX_TEMPLATE_BYTES, read_tokenizer_files
from tests.adapter_folders import small_base
from tests.adapters.refusals import refusal

BASE = small_base()
KNOWN = msgspec.structs.replace(BASE, tokens={f"t{index}": index for index in range(60)})


def read(files: dict[str, Any], known: bool = False) -> tuple[AdapterTemplate | None, list[str]]:
    """The template and the codes of what was found."""
    findings = Findings()
    data = {k: v if isinstance(v, bytes) else json.dumps(v).encode() for k, v in files.items()}
    template = read_tokenizer_files(data, KNOWN if known else BASE, findings).template
    error = refusal(findings.raise_if_any)
    return template, [violation.code for violation in error.violations] if error else []


def tokenizer(size: int, *added: int) -> dict[str, Any]:
    vocab = {f"t{index}": index for index in range(size)}
    listed = [{"id": i, "content": f"t{i}"} for i in added]
    return {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": listed}


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({}, False),
        ({"tokenizer.json": tokenizer(64)}, False),
        ({"tokenizer.json": tokenizer(40, 40, 63)}, False),
        ({"tokenizer.json": tokenizer(58, 58, 59)}, True),
        ({"tokenizer.json": tokenizer(60, 60, 61, 62, 63, 64, 65)}, True),
        ({"added_tokens.json": {"<a>": 63}}, False),
        ({"added_tokens.json": {}}, True),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"59": {"content": "t59"}}}}, True),
        ({"tokenizer.json": {"model": {"vocab": [[f"t{i}", -1.0] for i in range(60)]}}}, True),
        ({"tokenizer.json": {"model": {"type": "BPE", "vocab": {}}, "added_tokens": None}}, False),
    ],
)
def test_accepted(files: dict[str, Any], known: bool) -> None:
    assert read(files, known) == (None, [])


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"tokenizer.json": tokenizer(61)}, "added_tokens"),
        ({"tokenizer.json": tokenizer(60, 61)}, "added_tokens"),
        ({"tokenizer.json": tokenizer(60, KNOWN.most_ids)}, "added_tokens"),
        ({"tokenizer.json": tokenizer(60, 60, 61, 62, 63, 65)}, "added_tokens"),
        ({"tokenizer.json": tokenizer(61, 60), "added_tokens.json": {"x": 60}}, "other_tokenizer"),
        ({"added_tokens.json": {"t59": 60}}, "other_tokenizer"),
        (
            {"tokenizer.json": tokenizer(60, 60), "added_tokens.json": {"t60": 61}},
            "other_tokenizer",
        ),
        ({"tokenizer.json": tokenizer(59)}, "other_tokenizer"),
        ({"added_tokens.json": {"<a>": 64}}, "added_tokens"),
        ({"added_tokens.json": {"<a>": 61}}, "added_tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"60": {}}}}, "other_tokenizer"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"64": {"content": "x"}}}},
            "added_tokens",
        ),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"59": {"content": "x"}}}},
            "other_tokenizer",
        ),
        (
            {"tokenizer.json": {"model": {"vocab": {f"u{i}": i for i in range(60)}}}},
            "other_tokenizer",
        ),
        ({"added_tokens.json": {"<a>": 59}}, "other_tokenizer"),
        (
            {
                "chat_template.jinja": b"{{ eos_token }}",
                "tokenizer_config.json": {"eos_token": "<e>"},
            },
            "added_tokens",
        ),
        (
            {"tokenizer_config.json": {"eos_token": "<e>", "chat_template": "<e>"}},
            "added_tokens",
        ),
        ({"tokenizer.json": {"model": {"vocab": {"a": "b"}}}}, "bad_tokenizer_file"),
        ({"tokenizer.json": {"model": {"vocab": {"a": 10**30}}}}, "added_tokens"),
        ({"tokenizer.json": {"model": {"vocab": [["a", -1.0]] * 61}}}, "added_tokens"),
    ],
)
def test_refused_where_the_base_is_known(files: dict[str, Any], code: str) -> None:
    assert read(files, known=True)[1] == [code]


NEW = {"content": "<a>", "special": True, "rstrip": True, "lstrip": False, "normalized": False}


@pytest.mark.parametrize(
    ("files", "added"),
    [
        ({"tokenizer.json": tokenizer(60, 60, 61)}, (OwnToken(60, "t60"), OwnToken(61, "t61"))),
        ({"tokenizer.json": tokenizer(61, 60)}, (OwnToken(60, "t60"),)),
        ({"added_tokens.json": {"<b>": 61, "<a>": 60, "t5": 5}}, (60, 61)),
        (
            {
                "tokenizer_config.json": {"added_tokens_decoder": {"60": NEW}},
                "added_tokens.json": {"<a>": 60},
            },
            (OwnToken(60, "<a>", special=True, rstrip=True),),
        ),
        (
            {
                "added_tokens.json": {"<a>": 60},
                "tokenizer_config.json": {"eos_token": "<a>", "chat_template": "<a>"},
            },
            (60,),
        ),
    ],
)
def test_added_tokens(files: dict[str, Any], added: tuple[Any, ...]) -> None:
    findings = Findings()
    data = {name: json.dumps(content).encode() for name, content in files.items()}
    text = read_tokenizer_files(data, KNOWN, findings)
    findings.raise_if_any()
    is_told = isinstance(added[0], OwnToken)
    assert (text.added_tokens if is_told else tuple(t.id for t in text.added_tokens)) == added
    ends_with = "eos_token" in files.get("tokenizer_config.json", {})
    assert text.end_token_ids == ((60,) if ends_with else ())


def test_added_tokens_are_bounded() -> None:
    roomy = msgspec.structs.replace(KNOWN, vocab_size=1 << 20)
    for count, size, codes in ((4096, 1, []), (4097, 1, [0]), (9, 20_000, [0]), (6, 20_000, [])):
        findings = Findings()
        added = {f"{i:x}".ljust(size, "-") + "x": 60 + i for i in range(count)}
        data = {"added_tokens.json": json.dumps(added).encode()}
        read_tokenizer_files(data, roomy, findings)
        error = refusal(findings.raise_if_any)
        found = [] if error is None else [each.code for each in error.violations]
        assert found == ["added_tokens" for _ in codes], (count, size)


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": b"{{ a }}"}, "{{ a }}"),
        ({"tokenizer_config.json": {"chat_template": "{{ b }}"}}, "{{ b }}"),
        (
            {"chat_template.jinja": b"{{ a }}", "tokenizer_config.json": {"chat_template": "b"}},
            "{{ a }}",
        ),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "d"}]}},
            "d",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": []}, 3, None]}}, None),
        ({"tokenizer_config.json": {"chat_template": ""}}, None),
        ({"tokenizer_config.json": {"chat_template": "x\ud800"}}, "x?"),
    ],
)
def test_templates(files: dict[str, Any], template: str | None) -> None:
    found, codes = read(files)
    assert (found and found.source, codes) == (template, [])


@pytest.mark.parametrize("default", [{}, {"default": "d"}])
def test_templates_with_names(default: dict[str, str]) -> None:
    sources = default | {"rag": "r", "tool_use": "t"}
    listed = [{"name": name, "template": source} for name, source in sources.items()]
    found, codes = read({"tokenizer_config.json": {"chat_template": listed}})
    assert found is not None
    assert (found.sources, codes) == (sources, [])
    assert found.source == default.get("default")


def test_templates_with_names_are_judged_together() -> None:
    half = "x" * (MAX_TEMPLATE_BYTES // 2)
    listed = [{"name": name, "template": half} for name in ("default", "rag")]
    assert read({"tokenizer_config.json": {"chat_template": listed}})[1] == ["bad_chat_template"]
    wrong = [{"name": "default", "template": "d"}, {"name": "rag", "template": 3}]
    assert read({"tokenizer_config.json": {"chat_template": wrong}})[1] == ["bad_chat_template"]


SPECIAL_TOKENS: list[dict[str, Any]] = [
    {"bos_token": "<a>", "eos_token": {"__type": "AddedToken", "content": "<b>"}},
    {"pad_token": "<a>", "cls_token": "<b>", "sep_token": "<c>", "mask_token": "<d>"},
    {"unk_token": None, "add_bos_token": True, "image_token": "<a>", "extra_special_tokens": ["x"]},
    {"extra_special_tokens": {"image_token": "<a>", "call": "<b>"}},
    {"image_token": "<a>", "extra_special_tokens": {"image_token": "<b>"}},
]


@pytest.mark.parametrize("settings", SPECIAL_TOKENS)
def test_special_tokens_are_those_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    texts = [f"<{letter}>" for letter in "abcd"]
    library = Tokenizer(WordLevel({text: at for at, text in enumerate([*texts, "x"])}, "x"))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).special_tokens_map
    template, codes = read({"chat_template.jinja": b"t", "tokenizer_config.json": settings})
    assert template is not None
    assert codes == []
    assert {k: v for k, v in template.special_tokens.items() if v is not None} == theirs


def test_special_tokens_that_a_template_does_not_write() -> None:
    settings = {"pad_token": "<p>", "eos_token": "t2", "chat_template": "{{ eos_token }}"}
    assert read({"tokenizer_config.json": settings}, known=True)[1] == []


def test_special_tokens_of_a_template_only() -> None:
    settings = {"bos_token": None, "eos_token": "\ud800"}
    assert read({"tokenizer_config.json": {**settings, "unk_token": 3}}) == (None, [])
    template = AdapterTemplate("t", {"bos_token": None, "eos_token": "?"})
    assert read({"tokenizer_config.json": {**settings, "chat_template": "t"}}) == (template, [])
    assert read({"chat_template.jinja": b"t"}) == (AdapterTemplate("t", {}), [])


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": 3},
        {"bos_token": {"lstrip": True}},
        {"extra_special_tokens": {"call": ["x"]}},
        {"bos_token": "x" * 20_000},
        {"extra_special_tokens": {"x" * 20_000: "x"}},
    ],
)
def test_special_tokens_that_are_none(settings: dict[str, Any]) -> None:
    files = {"chat_template.jinja": b"t", "tokenizer_config.json": settings}
    assert read(files)[1] == ["bad_tokenizer_file"]
