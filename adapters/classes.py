"""Reads the meaning of a classifier's scores from a model's `config.json`. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from loraplex.adapters.errors import shown

ScoreActivation = Literal["softmax", "sigmoid", "none"]
# The short name of a classifier's head, and its tensor.
HEAD_OF_CLASSES = "score"
# Modules that are, or hold, the score head of an encoder.
HEADS_OF_ENCODERS = ("classifier", "pre_classifier", "pooler", "head")
SCORE = f"{HEAD_OF_CLASSES}.weight"
SCORE_BIAS = f"{HEAD_OF_CLASSES}.bias"
MOST_LABELS = 4096
# Of a head that gives each token scores: those of a step travel at once.
MOST_TOKEN_LABELS = 256
_IDENTITY, _SIGMOID = "Identity", "Sigmoid"


class ClassForm(msgspec.Struct, frozen=True):
    """Describes a classifier: a score for each label, from the last token that is no padding.

    Scores come from the output of the last norm. activation: makes probabilities of scores.
    pad_token_id: None = no token is padding. of_tokens: each token of a text has scores.
    """

    labels: tuple[str, ...]
    activation: ScoreActivation
    pad_token_id: int | None = None
    of_tokens: bool = False


class OwnClasses(msgspec.Struct, frozen=True):
    """Describes an adapter's own head. count: of labels. labels: () = they have no names.
    activation, pad_token_id: None = the adapter's files do not say. of_tokens: as of ClassForm."""

    count: int
    labels: tuple[str, ...] = ()
    activation: ScoreActivation | None = None
    pad_token_id: int | None = None
    of_tokens: bool = False

    def over(self, base: ClassForm | None, pad_token_id: int | None) -> ClassForm:
        """Fills gaps from the base, or with the usual. base: None = the base is no classifier."""
        labels = self.labels or (base.labels if base else unnamed(self.count))
        usual = base.activation if base else usual_activation(self.count)
        pad = pad_token_id if self.pad_token_id is None else self.pad_token_id
        return ClassForm(labels, self.activation or usual, pad, self.of_tokens)


def unnamed(count: int) -> tuple[str, ...]:
    """Makes transformers' names for labels without names."""
    return tuple(f"LABEL_{i}" for i in range(count))


def usual_activation(count: int) -> ScoreActivation:
    return "sigmoid" if count == 1 else "softmax"


def labels_said(config: Mapping[str, Any], refuse: Callable[[str], object]) -> tuple[str, ...]:
    """Reads the labels of `id2label`. () = there are none, or they were refused."""
    table = config.get("id2label") or {}
    if not isinstance(table, Mapping):
        refuse(f"id2label must be a table, got {shown(table)}")
        return ()
    count = len(table)
    if count > MOST_LABELS:
        refuse(f"id2label: at most {MOST_LABELS} labels are served, got {count}")
        return ()
    # JSON has texts as keys.
    if set(map(str, table)) != set(map(str, range(count))):
        refuse(f"id2label must name labels 0 to {count - 1}, got {shown(list(table))}")
        return ()
    by_text = {str(key): str(label) for key, label in table.items()}
    return tuple(by_text[str(i)] for i in range(count))


def activation_said(
    config: Mapping[str, Any], refuse: Callable[[str], object]
) -> ScoreActivation | None:
    """Reads sentence-transformers' setting, else follows transformers' `problem_type`."""
    table = config.get("sentence_transformers") or {}
    if not isinstance(table, Mapping):
        refuse(f"sentence_transformers must be a table, got {shown(table)}")
        table = {}
    told = table.get("activation_fn", config.get("sbert_ce_default_activation_function"))
    if told is not None:
        name = str(told).rpartition(".")[2]
        if name not in (_IDENTITY, _SIGMOID):
            refuse(f"activation_fn: scores through {shown(told)} are not served")
        return "none" if name == _IDENTITY else "sigmoid"
    kind = config.get("problem_type")
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" else None


def pad_said(config: Mapping[str, Any], vocab_size: int | None) -> int | None:
    """The id of the padding token that a config states, or None. vocab_size: None = not known. An
    id that no token has pads nothing.
    """
    pad = config.get("pad_token_id")
    if type(pad) is not int or pad < 0 or (vocab_size is not None and pad >= vocab_size):
        return None
    return pad
