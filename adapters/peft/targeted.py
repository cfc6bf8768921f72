"""What a config targets in a base: modules, modules of experts, tensors of all experts. Pure."""

from collections.abc import Iterator

from loraplex.adapters.base import ANY_EXPERT, BaseSpec, ExpertWeight, base_modules, layer_path
from loraplex.adapters.peft.targeting import Targeting
from loraplex.adapters.peft.tensor_names import NAMINGS, Naming
from loraplex.adapters.violations import Findings, shown

# What PEFT's `target_parameters` calls the weight of an ordinary module.
_WEIGHT = ".weight"


def expert_path(path: str, expert: int) -> str:
    """path: of a module that each expert has."""
    return path.replace(ANY_EXPERT, str(expert))


def module_paths(base: BaseSpec) -> Iterator[str]:
    """Whole names of the base's modules, each expert's on its own."""
    for module in base_modules(base):
        if module.shape.is_of_experts:
            for expert in range(module.shape.experts):
                yield expert_path(module.path, expert)
        else:
            yield module.path


def stacked_weights(base: BaseSpec, layer: int) -> Iterator[ExpertWeight]:
    """The tensors of all experts that a layer has."""
    for weight in base.expert_weights:
        if base.layer_modules[weight.parts[0]].is_in(layer):
            yield weight


def targeted_paths(matcher: Targeting, base: BaseSpec, naming: Naming) -> dict[str, str]:
    """Path in the base of each module and tensor of experts that the config targets -> what
    patterns of rank and alpha see: its name in the trained model."""
    head = base.model_modules.get("lm_head")
    head_path = None if head is None else head.path
    targeted = {}
    for path in module_paths(base):
        spelled = naming.spelled(path)
        if spelled is None:
            continue
        if matcher.targets(spelled, is_output_head=path == head_path):
            targeted[path] = spelled
        elif matcher.targets_parameter(spelled + _WEIGHT):
            targeted[path] = spelled + _WEIGHT
    for path in _stacked_paths(base):
        spelled = naming.spelled(path)
        if spelled is not None and matcher.targets_parameter(spelled):
            targeted[path] = spelled
    return targeted


def check_parameters(names: tuple[str, ...], base: BaseSpec, findings: Findings) -> None:
    """Refuses names in `target_parameters` of what is not served."""
    if not names:
        return
    if base.is_inferred:
        message = "target_parameters can only be checked against the base model; name it"
        findings.add("needs_base", "target_parameters", message)
        return
    known = {*_stacked_paths(base), *(path + _WEIGHT for path in module_paths(base))}
    routers = {path + _WEIGHT for path in router_paths(base)}
    for name in names:
        if _names_any(name, known):
            continue
        if _names_any(name, routers):
            message = f"target_parameters: {shown(name)} is a router; LoRA on routers is not served"
            findings.add("unsupported_target", "target_parameters", message)
        else:
            message = (
                f"target_parameters: the base model has no weight {shown(name)} that is served"
            )
            findings.add("unknown_target", "target_parameters", message)


def router_paths(base: BaseSpec) -> Iterator[str]:
    for layer in range(base.num_layers):
        for path in base.routers:
            yield layer_path(layer, path)


def _names_any(name: str, paths: set[str]) -> bool:
    """Whether it is the end of a path, however a model is called that the base lies in."""
    last = name.rpartition(".")[2]
    return any(
        spelled == name or spelled.endswith(f".{name}")
        for path in paths
        if path.endswith(last)
        for naming in NAMINGS
        if (spelled := naming.spelled(path)) is not None
    )


def _stacked_paths(base: BaseSpec) -> Iterator[str]:
    for layer in range(base.num_layers):
        for weight in stacked_weights(base, layer):
            yield layer_path(layer, weight.path)
