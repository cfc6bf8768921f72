"""The head on top of a decoder of a served type: for text, for classes, or none.

Pure. The class that `config.json` names decides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from loraplex.adapters.classes import (
    MOST_LABELS,
    MOST_TOKEN_LABELS,
    ClassForm,
    activation_said,
    labels_said,
    pad_said,
    unnamed,
    usual_activation,
)
from loraplex.server.model.families.fields import Fields
from loraplex.server.model.spec.model_spec import ModelSpec

HeadForm = Literal["text", "none", "classes", "token classes"]
_TEXTS, _CLASSES = ("ForCausalLM", "LMHeadModel"), "ForSequenceClassification"
# Classes of encoders, by how they end.
_ENCODERS = tuple(f"{stem}Model" for stem in ("Bert", "Roberta", "MPNet", "Electra", "DebertaV2"))
_OF_ENCODERS: dict[str, HeadForm] = {
    "Model": "none",
    "ForMaskedLM": "none",
    "ForPreTraining": "none",
    _CLASSES: "classes",
    "ForTokenClassification": "token classes",
}
# Labels where `config.json` names none.
_USUAL_LABELS = 2


def architectures_of(served: str) -> dict[str, HeadForm]:
    """Return the head form of each architecture, by name in small letters: the class that is
    served, and those of the same decoder.
    """
    if served.endswith(_ENCODERS):
        stem = served.removesuffix("Model")
        return {f"{stem}{ending}".lower(): form for ending, form in _OF_ENCODERS.items()}
    found: dict[str, HeadForm] = {served.lower(): "text"}
    ending = next(filter(served.endswith, _TEXTS), None)
    if ending is not None:
        stem = served.removesuffix(ending)
        for name in (stem, f"{stem}Text"):
            found[f"{name}Model".lower()] = "none"
            found[f"{name}{_CLASSES}".lower()] = "classes"
    return found


def head_form(config: Mapping[str, Any], served: str) -> HeadForm | None:
    """Return the form of the head that a configuration names. None: the class is another one."""
    named = config.get("architectures")
    if not named or not isinstance(named, list):
        return "text"
    known = architectures_of(served)
    forms = [known[str(name).lower()] for name in named if str(name).lower() in known]
    return forms[0] if forms else None


def architecture_of(config: Mapping[str, Any], served: Sequence[str]) -> str:
    """Return the class, of those that are served of a type, that a configuration names; the first
    where it names none of them.
    """
    return next((name for name in served if head_form(config, name) is not None), served[0])


def with_head(model: ModelSpec, form: HeadForm, fields: Fields) -> ModelSpec:
    """Return the model with the padding token that the config states, and a head of this form.

    "text": its own head stays. Others: the model writes no text, and its classes are as
    the config says. `fields` collects what is refused.
    """
    model = replace(model, pad_token_id=pad_said(fields.config, model.vocab_size))
    if form == "text":
        return model
    if form == "none":
        classes = None
    else:
        classes = _read_classes(fields, model.pad_token_id, of_tokens=form == "token classes")
    return replace(model, head=replace(model.head, tied=True), writes=False, classes=classes)


def _read_classes(fields: Fields, pad: int | None, *, of_tokens: bool) -> ClassForm:
    labels = labels_said(fields.config, fields.refuse)
    count = len(labels) or int(fields.positive("num_labels", _USUAL_LABELS))
    most = MOST_TOKEN_LABELS if of_tokens else MOST_LABELS
    if count > most:
        fields.refuse(f"num_labels: at most {most} are served, got {count}")
        count = 1
    said = activation_said(fields.config, fields.refuse)
    return ClassForm(labels or unnamed(count), said or usual_activation(count), pad, of_tokens)
