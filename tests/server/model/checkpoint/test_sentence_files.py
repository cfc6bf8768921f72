"""What sentence-transformers' files say of a model, and what of it is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.server.config import ConfigError
from loraplex.server.model.card import read_base_spec
from loraplex.server.model.checkpoint.checkpoint import CheckpointError, check_folder, read_config
from loraplex.server.model.checkpoint.sentence_files import read_sentence_files
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.vector_forms import VectorWishes, vector_form
from loraplex.server.protocol import ClassForm, VectorForm
from tests.server.model.hub_models import make_model, save_model

PACKAGE = "sentence_transformers.models."
QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def write(folder: Path, *kinds: str, **files: Any) -> Path:
    """Of modules of these kinds; files: by name, with `__` for `.` and `/`."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": PACKAGE + kind}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content))
    return folder


def write_pooling(folder: Path, **config: Any) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def test_dense_modules(tmp_path: Path) -> None:
    write(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    write_pooling(tmp_path, pooling_mode="cls")
    shapes = ((32, 16, "torch.nn.modules.activation.Tanh"), (16, 8, "torch.nn.Identity"))
    for number, (taken, given, activation) in enumerate(shapes, 2):
        config = {"in_features": taken, "out_features": given, "activation_function": activation}
        (tmp_path / f"{number}_Dense").mkdir()
        (tmp_path / f"{number}_Dense" / "config.json").write_text(json.dumps(config))
    files = read_sentence_files(tmp_path)
    assert files is not None
    assert [each.activation for each in files.dense] == ["tanh", None]
    assert files.size(32) == 8
    assert (files.pooling, files.normalises) == ("first", True)
    with pytest.raises(ConfigError, match="2_Dense: in_features must be 33, got 32"):
        files.size(33)


def test_as_qwens_embeddings_have_them(tmp_path: Path) -> None:
    write(
        tmp_path,
        *("Transformer", "Pooling", "Normalize"),
        config_sentence_transformers={
            "prompts": {"query": "Instruct: find\nQuery:", "document": ""},
            "default_prompt_name": None,
        },
        sentence_bert_config={"max_seq_length": 100},
    )
    write_pooling(
        tmp_path,
        word_embedding_dimension=32,
        pooling_mode_cls_token=False,
        pooling_mode_mean_tokens=False,
        pooling_mode_lasttoken=True,
        include_prompt=True,
    )
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    model = read_config(tmp_path)
    assert not model.writes
    assert model.head.tied
    files = read_sentence_files(tmp_path)
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    assert vector_form(model, 128, files, VectorWishes()) == VectorForm(
        32, 100, "last", normalises=True, prompts=prompts
    )
    wishes = VectorWishes("mean", False, ("mine=Say: a=b",), "mine")
    form = vector_form(model, 64, files, wishes)
    assert form == VectorForm(
        32, 64, "mean", normalises=False, prompts={**prompts, "mine": "Say: a=b"},
        default_prompt="mine",
    )  # fmt: skip


def test_newer_words_and_usual_values(tmp_path: Path) -> None:
    write(tmp_path, "Transformer", "Pooling")
    write_pooling(tmp_path, embedding_dimension=32, pooling_mode="mean")
    files = read_sentence_files(tmp_path)
    assert files is not None
    assert (files.pooling, files.normalises, files.max_tokens, files.prompts) == (
        *("mean", False, None),
        {},
    )
    write_pooling(tmp_path)
    assert read_sentence_files(tmp_path) == files


def test_a_model_for_text_gives_vectors_of_its_last_token() -> None:
    form = vector_form(read_model(QWEN), 128, None, VectorWishes())
    assert form == VectorForm(32, 128, "last", normalises=True)


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "LSTM"), {}, "modules.json: LSTM is not served"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {}, "Normalize, Dense is not served"),
        (("Pooling", "Transformer"), {}, "modules.json: Pooling, Transformer is not served"),
        (("Transformer", "WordWeights"), {}, "modules.json: WordWeights is not served"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_weightedmean_tokens": True},
            "1_Pooling/config.json: pooling_mode must be one of lasttoken, mean, cls, max",
        ),
        (("Transformer", "Pooling"), {"pooling_mode": ["mean", "max"]}, "pooling_mode must be"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode": "mean", "include_prompt": False},
            "include_prompt",
        ),
    ],
)
def test_what_is_not_served(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], words: str
) -> None:
    write(tmp_path, *kinds)
    write_pooling(tmp_path, **pooling)
    with pytest.raises(ValueError, match=words):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case"),
        ({"sentence_bert_config": {"max_seq_length": "9"}}, "max_seq_length"),
        ({"sentence_bert_config": {"transformer_task": "fill-mask"}}, "transformer_task"),
        ({"config_sentence_transformers": {"prompts": ["x"]}}, "prompts must be a table"),
        ({"config_sentence_transformers": {"default_prompt_name": "x"}}, "default_prompt_name"),
        ({"config_sentence_transformers": [1]}, "must be an object"),
    ],
)
def test_malformed_files(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    write(tmp_path, "Transformer", "Pooling", **files)
    with pytest.raises(ValueError, match=words):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    "modules", [b"[", b"{}", b"[3]", b'[{"path": "../x"}]', b'[{"path": "/x"}]']
)
def test_a_list_of_modules_that_is_none(tmp_path: Path, modules: bytes) -> None:
    (tmp_path / "modules.json").write_bytes(modules)
    with pytest.raises(ValueError, match=r"modules\.json"):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (VectorWishes(prompts=("query",)), "--prompt: expected NAME=TEXT"),
        (VectorWishes(prompts=("=x",)), "--prompt: expected NAME=TEXT"),
        (VectorWishes(default_prompt="query"), "--default-prompt: there is no prompt 'query'"),
    ],
)
def test_wishes_that_cannot_be(wishes: VectorWishes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vector_form(read_model(QWEN), 128, None, wishes)


def test_code_that_may_attend_both_ways_is_never_run_causally(tmp_path: Path) -> None:
    """GTE-Qwen2: by the library's own name, with code beside it."""
    code = {
        "AutoModel": "modeling_qwen.Qwen2Model",
        "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
    }
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "auto_map": code}))
    assert read_config(tmp_path).writes  # without the files it is a model for text
    write(tmp_path, "Transformer", "Pooling")
    write_pooling(tmp_path, pooling_mode_lasttoken=True)
    with pytest.raises(CheckpointError, match=r"auto_map: its vectors need code of its own"):
        read_config(tmp_path)
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        read_model({**QWEN, "use_bidirectional_attention": True}, for_vectors=True)
    assert not read_model({**QWEN, "is_causal": False}, for_vectors=True).is_causal


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ClassForm(("LABEL_0", "LABEL_1"), "softmax")),
        ({"num_labels": 1}, ClassForm(("LABEL_0",), "sigmoid")),
        (
            {"id2label": {"0": "no", "1": "yes", "2": "?"}, "pad_token_id": 3},
            ClassForm(("no", "yes", "?"), "softmax", 3),
        ),
        (
            {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"},
            ClassForm(("a", "b"), "sigmoid"),
        ),
        ({"num_labels": 1, "problem_type": "regression"}, ClassForm(("LABEL_0",), "none")),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            ClassForm(("LABEL_0",), "none"),
        ),
    ],
)
def test_classes(config: dict[str, Any], expected: ClassForm) -> None:
    model = read_model({**QWEN, "architectures": ["Qwen2ForSequenceClassification"], **config})
    assert model.classes == expected
    assert not model.writes
    assert vector_form(model, 128, None, VectorWishes()) is None
    with pytest.raises(ConfigError, match="this one is a classifier"):
        vector_form(model, 128, None, VectorWishes("mean"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"id2label": {"1": "a", "5": "b"}}, "id2label must name labels 0 to 1"),
        ({"id2label": ["a"]}, "id2label must be a table"),
        ({"num_labels": 10**6}, "num_labels: at most"),
        ({"sentence_transformers": {"activation_fn": "mine.Gauss"}}, "activation_fn"),
    ],
)
def test_classes_that_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_model({**QWEN, "architectures": ["Qwen2ForSequenceClassification"], **config})


def test_a_head_that_is_stored_beside_is_left_out(tmp_path: Path) -> None:
    """e5-mistral's kin: a model for text, saved whole, with files of sentence-transformers."""
    save_model(make_model("llama3"), tmp_path)
    write(tmp_path, "Transformer", "Pooling")
    assert not check_folder(tmp_path).writes
    assert set(read_base_spec(tmp_path, ("base",)).embedding_digests) == {"embed_tokens", "lm_head"}
