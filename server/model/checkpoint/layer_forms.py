"""Forms of a checkpoint's experts and convolutions, as its tensors tell them. No torch."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from msgspec.structs import replace

from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.server.model.spec.linear_spec import ExpertForm, ExpertStorage, LinearSpec
from loraplex.server.model.spec.model_spec import Branch, ModelSpec, layer_path
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.state_spec import CONV, DeltaNetSpec


def as_stored(model: ModelSpec, names: Mapping[str, TensorInfo]) -> ModelSpec:
    """Return the model with experts and convolutions in the forms that a checkpoint with these
    tensors holds. Where it holds none, as the family says.
    """
    model = _mapped(model, partial(_convolved, names))
    forms = chain.from_iterable(
        _forms(layer_path(index, linear.stored.path), linear.stored, names)
        for index, layer in enumerate(model.layers)
        for linear in layer.linears
        if linear.stored is not None
    )
    form = next(forms, None)
    if form is None:
        return model
    return _mapped(model, partial(_branch, form, names))


def _mapped(model: ModelSpec, change: Callable[[int, Branch], Branch]) -> ModelSpec:
    layers = (layer.mapped(partial(change, index)) for index, layer in enumerate(model.layers))
    return replace(model, layers=tuple(layers))


def _convolved(names: Mapping[str, TensorInfo], layer: int, branch: Branch) -> Branch:
    """The branch with the convolution in the parts that the checkpoint has, which savers of a whole
    one cut in equal ones."""
    if not isinstance(branch, DeltaNetSpec) or not branch.convs:
        return branch
    path = layer_path(layer, branch.path)
    if f"{path}.{CONV}.weight" in names:
        return replace(branch, convs=())
    parts = [(conv, names.get(f"{path}.{conv}.weight")) for conv, _ in branch.convs]
    rows = tuple((conv, of.shape[0]) for conv, of in parts if of is not None and of.shape)
    is_whole = sum(number for _, number in rows) == branch.num_channels
    return replace(branch, convs=rows) if is_whole else branch


def _forms(path: str, stored: ExpertStorage, names: Mapping[str, TensorInfo]) -> list[ExpertForm]:
    if path in names:
        return ["stacked"]
    if stored.form == "stacked" and f"{path}_blocks" in names:
        return ["mxfp4"]
    return []


def _branch(
    form: ExpertForm, names: Mapping[str, TensorInfo], layer: int, branch: Branch
) -> Branch:
    if not isinstance(branch, MoeSpec):
        return branch
    stored, router = branch.gate_up.stored, branch.router
    if stored is not None and form == "stacked":  # the router lies beside the experts
        (part,), (each, *_) = router.parts, branch.gate_up.parts
        block, own = stored.path.rsplit(".", 2)[0], each.path.rsplit(".", 3)[0]
        path = part.path.replace(own, block, 1)
        router = replace(router, parts=(replace(part, path=path),))
    experts = branch.gate_up, branch.down
    gate_up, down = (_linear(linear, form, layer, names) for linear in experts)
    return replace(branch, router=router, gate_up=gate_up, down=down)


def _linear(
    linear: LinearSpec, form: ExpertForm, layer: int, names: Mapping[str, TensorInfo]
) -> LinearSpec:
    stored = linear.stored
    if stored is None:
        return linear
    tensor = names.get(layer_path(layer, stored.path))
    if stored.flips and form == "stacked" and tensor is not None:
        usual = (linear.experts, linear.out_features, linear.in_features)
        stored = replace(stored, transposed=tensor.shape != usual)
    return replace(linear, stored=replace(stored, form=form))
