"""What stands on top of a decoder of a served type: a head for text, one for classes, or none.

Pure. The class that `config.json` names says it.
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec.structs import replace

from adapters.violations import shown
from server.model.classes_spec import ClassesSpec, ScoreActivation
from server.model.families.fields import Fields
from server.model.spec import ModelSpec

HeadForm = Literal["text", "none", "classes"]
_TEXT, _CLASSES = "ForCausalLM", "ForSequenceClassification"
# Labels where `config.json` names none.
_USUAL_LABELS = 2
_MOST_LABELS = 4096
_IDENTITY, _SIGMOID = "Identity", "Sigmoid"


def architectures_of(served: str) -> dict[str, HeadForm]:
    """By name, in small letters: the class that is served, and those of the same decoder."""
    found: dict[str, HeadForm] = {served.lower(): "text"}
    if served.endswith(_TEXT):
        stem = served.removesuffix(_TEXT)
        for name in (stem, f"{stem}Text"):
            found[f"{name}Model".lower()] = "none"
            found[f"{name}{_CLASSES}".lower()] = "classes"
    return found


def head_form(config: Mapping[str, Any], served: str) -> HeadForm | None:
    """None: the class is another one."""
    named = config.get("architectures")
    if not named or not isinstance(named, list):
        return "text"
    known = architectures_of(served)
    forms = [known[str(name).lower()] for name in named if str(name).lower() in known]
    return forms[0] if forms else None


def with_head(model: ModelSpec, form: HeadForm, fields: Fields) -> ModelSpec:
    """The model with what stands on top of it."""
    if form == "text":
        return model
    classes = None if form == "none" else _read_classes(fields, model.vocab_size)
    return replace(model, head=replace(model.head, tied=True), writes=False, classes=classes)


def _read_classes(fields: Fields, vocab_size: int) -> ClassesSpec:
    labels = _read_labels(fields)
    pad = fields.config.get("pad_token_id")
    if pad is not None and (type(pad) is not int or not 0 <= pad < vocab_size):
        # An id that no token has pads nothing.
        pad = None
    return ClassesSpec(labels, _read_activation(fields, len(labels)), pad)


def _read_labels(fields: Fields) -> tuple[str, ...]:
    table = fields.table(fields.config, "id2label")
    count = len(table) or int(fields.positive("num_labels", _USUAL_LABELS))
    if count > _MOST_LABELS:
        fields.refuse(f"id2label: at most {_MOST_LABELS} labels are served, got {count}")
        return ("LABEL_0",)
    # JSON has texts as keys.
    labels = [str(table.get(str(i), f"LABEL_{i}")) for i in range(count)]
    if table and set(map(str, table)) != set(map(str, range(count))):
        fields.refuse(f"id2label must name labels 0 to {count - 1}, got {shown(list(table))}")
    return tuple(labels)


def _read_activation(fields: Fields, count: int) -> ScoreActivation:
    """As sentence-transformers was told, else as transformers' kind of problem says."""
    told = _told_activation(fields)
    if told is not None:
        name = told.rpartition(".")[2]
        if name not in (_IDENTITY, _SIGMOID):
            fields.refuse(f"activation_fn: scores through {shown(told)} are not served")
        return "none" if name == _IDENTITY else "sigmoid"
    kind = fields.config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if count == 1 or kind == "multi_label_classification" else "softmax"


def _told_activation(fields: Fields) -> str | None:
    table = fields.table(fields.config, "sentence_transformers")
    told = table.get("activation_fn", fields.config.get("sbert_ce_default_activation_function"))
    return None if told is None else str(told)
