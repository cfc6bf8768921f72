"""Which form a checkpoint's experts have, as the names of its tensors tell. No torch."""

from collections.abc import Container
from itertools import chain

from msgspec.structs import replace

from loraplex.server.model.spec.linear_spec import ExpertForm, ExpertStorage, LinearSpec
from loraplex.server.model.spec.model_spec import Branch, ModelSpec, layer_path
from loraplex.server.model.spec.moe_spec import MoeSpec


def as_stored(model: ModelSpec, names: Container[str]) -> ModelSpec:
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
        layers=tuple(layer.mapped(lambda branch: _branch(branch, form)) for layer in model.layers),
    )


def _forms(path: str, stored: ExpertStorage, names: Container[str]) -> list[ExpertForm]:
    if path in names:
        return ["stacked"]
    if stored.form == "stacked" and f"{path}_blocks" in names:
        return ["mxfp4"]
    return []


def _branch(branch: Branch, form: ExpertForm) -> Branch:
    if not isinstance(branch, MoeSpec):
        return branch
    stored, router = branch.gate_up.stored, branch.router
    if stored is not None and form == "stacked":  # the router lies beside the experts
        block = stored.path.rsplit(".", 2)[0]
        router = f"{block}.{router.rpartition('.')[2]}"
    gate_up, down = _linear(branch.gate_up, form), _linear(branch.down, form)
    return replace(branch, router=router, gate_up=gate_up, down=down)


def _linear(linear: LinearSpec, form: ExpertForm) -> LinearSpec:
    if linear.stored is None:
        return linear
    return replace(linear, stored=replace(linear.stored, form=form))
