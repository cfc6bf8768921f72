"""The score head of an adapter that is a classifier, whatever the base's head is. Pure.

Source: PEFT 0.21, `PeftModelForSequenceClassification`, which saves `score` (`classifier` in other
models) beside LoRA; transformers' `…ForSequenceClassification`, which has no other head.
"""

from typing import Literal

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.classes import HEAD_OF_CLASSES, MOST_LABELS
from loraplex.adapters.peft.config import SEQ_CLS, PeftConfig
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.violations import Findings

HEAD_OF_TEXT = "lm_head"


def own_head(config: PeftConfig) -> Literal["none", "perhaps", "surely"]:
    """Whether the file has a score head."""
    if HEAD_OF_CLASSES in config.modules_to_save:
        return "surely"
    return "perhaps" if config.task_type == SEQ_CLS else "none"


def check_head(config: PeftConfig, findings: Findings) -> None:
    """Before there are tensors."""
    if own_head(config) != "surely":
        return
    if config.alora_invocation_tokens:
        message = f"modules_to_save: {HEAD_OF_CLASSES} not with alora_invocation_tokens"
        findings.add("unsupported_feature", "modules_to_save", message)
    trained = (*config.modules_to_save, *(name for name, _ in config.trainable_token_indices))
    if HEAD_OF_TEXT in trained:
        message = f"{HEAD_OF_CLASSES} and {HEAD_OF_TEXT}: one adapter has one head"
        findings.add("unsupported_feature", "modules_to_save", message)


def place_head(
    config: PeftConfig, tensor: TensorInfo | None, base: BaseSpec, findings: Findings
) -> TensorInfo | None:
    """tensor: what the file has of it. What is wrong with it is added to `findings`."""
    if tensor is None:
        if own_head(config) == "surely":
            message = f"modules_to_save has {HEAD_OF_CLASSES}, and the file has no weights of it"
            findings.add("missing_tensor", HEAD_OF_CLASSES, message)
        return None
    name = tensor.name
    if tensor.dtype not in FLOAT_DTYPES:
        message = f"{name}: dtype {tensor.dtype}, expected one of {sorted(FLOAT_DTYPES)}"
        findings.add("unsupported_dtype", name, message)
    labels = tensor.shape[0] if len(tensor.shape) == 2 else 0
    if not 0 < labels <= MOST_LABELS or tensor.shape[1] != base.hidden_size:
        expected = f"1 to {MOST_LABELS} labels of {base.hidden_size} numbers each"
        message = f"{name}: expected {expected}, got {list(tensor.shape)}"
        findings.add("shape_mismatch", name, message)
    elif base.num_classes not in (0, labels):
        message = f"{name}: {labels} labels; the base model has {base.num_classes}"
        findings.add("shape_mismatch", name, message)
    return tensor
