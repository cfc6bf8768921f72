"""The model's `config.json` beside an adapter with a score head: names of its labels. Pure."""

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.classes import OwnClasses, activation_said, labels_said, pad_said
from loraplex.adapters.common.strict_json import StrictJsonError, decode_object
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.violations import Findings

CLASSES_FILE = "config.json"
MAX_CLASSES_BYTES = 1 << 20


def read_classes(
    data: bytes | None, head: TensorInfo, base: BaseSpec, findings: Findings
) -> OwnClasses:
    """data: the file, if it is there. head: `[labels, hidden]`."""
    count = head.shape[0]
    if data is None:
        return OwnClasses(count)

    def refuse(words: str) -> None:
        findings.add("bad_value", CLASSES_FILE, f"{CLASSES_FILE}: {words}")

    try:
        config = decode_object(data)
    except StrictJsonError as error:
        findings.add("bad_config", CLASSES_FILE, f"{CLASSES_FILE} is {error}")
        return OwnClasses(count)
    labels = labels_said(config, refuse)
    if labels and len(labels) != count:
        words = f"id2label names {len(labels)} labels; {head.name} has {count}"
        findings.add("labels_mismatch", CLASSES_FILE, f"{CLASSES_FILE}: {words}")
    vocab_size = None if base.is_inferred else base.vocab_size
    return OwnClasses(count, labels, activation_said(config, refuse), pad_said(config, vocab_size))
