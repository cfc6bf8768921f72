"""Weights of norms that an adapter has in place of the base's. Pure.

Source: PEFT 0.21, `modules_to_save`, of ends of modules' names: `norm` means every norm.
"""

from collections.abc import Iterator, Mapping

from loraplex.adapters.base import BaseNorm, BaseSpec
from loraplex.adapters.peft.config import PeftConfig, is_norm
from loraplex.adapters.peft.lora_tensors import OwnNorm
from loraplex.adapters.safetensors.header import FLOAT_DTYPES, TensorInfo
from loraplex.adapters.violations import Findings, shown


def saved_norms(config: PeftConfig, base: BaseSpec) -> tuple[BaseNorm, ...]:
    """Those that the config names."""
    names = tuple(filter(is_norm, config.modules_to_save))
    return tuple(norm for norm in base.norms if names and norm.path.endswith(names))


def check_norms(config: PeftConfig, base: BaseSpec, findings: Findings) -> None:
    """Before there are tensors."""
    names = [name for name in config.modules_to_save if is_norm(name)]
    if names and config.alora_invocation_tokens:
        message = "modules_to_save: norms not with alora_invocation_tokens, since they act on all"
        findings.add("unsupported_feature", "modules_to_save", message)
    for name in names:
        if any(norm.path.endswith(name) for norm in base.norms):
            continue
        holder = "file" if base.is_inferred else "base model"
        code = "missing_tensor" if base.is_inferred else "unsupported_feature"
        message = f"modules_to_save: the {holder} has no norm {shown(name)}"
        findings.add(code, "modules_to_save", message)
    unserved = {norm.name for norm in saved_norms(config, base) if not norm.is_served}
    for name in sorted(unserved):
        message = (
            f"modules_to_save: {name} is not served, only norms before attention, before the MLP "
            "and at the end are; merge the adapter into its base, or train it without"
        )
        findings.add("unsupported_feature", "modules_to_save", message)


def place_norms(
    config: PeftConfig, tensors: Mapping[str, TensorInfo], base: BaseSpec, findings: Findings
) -> Iterator[OwnNorm]:
    """tensors: by the norm's path. What is wrong is added to `findings`."""
    for norm in saved_norms(config, base):
        tensor = tensors.get(norm.path)
        if tensor is None:
            message = f"modules_to_save has {norm.path}, and the file has no weights of it"
            findings.add("missing_tensor", norm.path, message)
            continue
        name = tensor.name
        if tensor.dtype not in FLOAT_DTYPES:
            message = f"{name}: dtype {tensor.dtype}, expected one of {sorted(FLOAT_DTYPES)}"
            findings.add("unsupported_dtype", name, message)
        if tensor.shape != (norm.size,):
            message = f"{name}: expected [{norm.size}], got {list(tensor.shape)}"
            findings.add("shape_mismatch", name, message)
        yield OwnNorm(norm.name, norm.place, tensor)
