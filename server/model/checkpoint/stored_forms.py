"""Forms of a checkpoint's quantised matrices, experts and convolutions, as its tensors tell them.
No torch.

The tensors decide: what `ignore` and `modules_to_not_convert` leave out is there in floating point.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from msgspec.structs import replace

from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.server.model.quantisation.forms import (
    FLOATS,
    INVERSE,
    EightBitForm,
    TensorForm,
    WeightForm,
)
from loraplex.server.model.spec.linear_spec import ExpertForm, ExpertStorage, LinearSpec
from loraplex.server.model.spec.model_spec import Branch, ModelSpec, layer_path
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.picture_spec import PatchSpec
from loraplex.server.model.spec.state_spec import CONV, DeltaNetSpec

StoredForms = Mapping[str, WeightForm]


def stored_forms(model: ModelSpec, stored: Mapping[str, TensorInfo]) -> StoredForms:
    """The form of each quantised module, by its path."""
    if model.quantisation is None:
        return {}
    forms = {}
    # Modules of an encoder of pictures have the file's names in a table of quantised weights.
    is_tower = isinstance(model.embedding, PatchSpec)
    named = (
        {name.rpartition(".")[0]: each.name for name, each in stored.items()} if is_tower else {}
    )
    for matrix in model.matrices():
        form = model.quantisation.form(*_names(matrix.path, named.get(matrix.path)))
        if form is not None and _has_form(matrix.path, form, stored):
            forms[matrix.path] = _as_named(matrix.path, form, stored)
    return forms


def _names(path: str, stored: str | None) -> tuple[str, ...]:
    """Names of a module in a table of quantised weights. stored: one of the module's tensors, as
    the file names it; None = the module has the name of its path.
    """
    if stored is None:
        return (path,)
    module = stored.rpartition(".")[0].removeprefix("model.")
    return module, f"model.{module}"


def _has_form(path: str, form: WeightForm, stored: Mapping[str, TensorInfo]) -> bool:
    """Say whether a matrix is to be read in the quantised form. So it is where nothing is stored:
    then what the form needs is missing.
    """
    marker = stored.get(f"{path}.{form.marker.suffix}")
    if marker is not None and marker.dtype in form.marker.dtypes:
        return True
    plain = stored.get(f"{path}.weight")
    return plain is None or plain.dtype not in FLOATS


def _as_named(path: str, form: WeightForm, stored: Mapping[str, TensorInfo]) -> WeightForm:
    """Return the form with the names that the checkpoint has: some writers call every scale of FP8
    inverse.
    """
    if isinstance(form, EightBitForm) and f"{path}.{INVERSE}" in stored:
        return replace(form, scale=INVERSE)
    return form


def expected_tensors(model: ModelSpec, forms: StoredForms) -> dict[str, TensorForm]:
    """Every tensor that the checkpoint must or may hold, by name."""
    optional, needed = model.optional_tensors().items(), model.tensors().items()
    expected = {name: TensorForm(name, FLOATS, (shape,), optional=True) for name, shape in optional}
    expected |= {name: TensorForm(name, FLOATS, (shape,)) for name, shape in needed}
    for matrix in model.matrices():
        form = forms.get(matrix.path)
        if form is not None:
            del expected[f"{matrix.path}.weight"]
            for tensor in form.tensors(matrix.out_features, matrix.in_features):
                expected.setdefault(f"{matrix.path}.{tensor.suffix}", tensor)
    return expected


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
