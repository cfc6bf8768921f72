"""Forms of a checkpoint's experts, as its tensors tell them. No torch."""

from collections.abc import Mapping
from functools import partial
from itertools import chain

from msgspec.structs import replace

from loraplex.server.model.checkpoint.checkpoint import StoredTensor
from loraplex.server.model.spec.linear_spec import ExpertForm, ExpertStorage, LinearSpec
from loraplex.server.model.spec.model_spec import Branch, ModelSpec, layer_path
from loraplex.server.model.spec.moe_spec import MoeSpec


def as_stored(model: ModelSpec, names: Mapping[str, StoredTensor]) -> ModelSpec:
    """Return the model with experts in the form that a checkpoint with these tensors holds. Where
    it holds none, as the family says.
    """
    forms = chain.from_iterable(
        _forms(layer_path(index, linear.stored.path), linear.stored, names)
        for index, layer in enumerate(model.layers)
        for linear in layer.linears
        if linear.stored is not None
    )
    form = next(forms, None)
    if form is None:
        return model
    return replace(
        model,
        layers=tuple(
            layer.mapped(partial(_branch, form, index, names))
            for index, layer in enumerate(model.layers)
        ),
    )


def _forms(path: str, stored: ExpertStorage, names: Mapping[str, StoredTensor]) -> list[ExpertForm]:
    if path in names:
        return ["stacked"]
    if stored.form == "stacked" and f"{path}_blocks" in names:
        return ["mxfp4"]
    return []


def _branch(
    form: ExpertForm, layer: int, names: Mapping[str, StoredTensor], branch: Branch
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
    linear: LinearSpec, form: ExpertForm, layer: int, names: Mapping[str, StoredTensor]
) -> LinearSpec:
    stored = linear.stored
    if stored is None:
        return linear
    tensor = names.get(layer_path(layer, stored.path))
    if stored.flips and form == "stacked" and tensor is not None:
        usual = (linear.experts, linear.out_features, linear.in_features)
        stored = replace(stored, transposed=tensor.shape != usual)
    return replace(linear, stored=replace(stored, form=form))
