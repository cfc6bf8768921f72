"""The quantised matrices of a checkpoint, and the tensors that each then has. No torch.

The tensors decide: what `ignore` and `modules_to_not_convert` leave out is there in floating point.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.server.model.quantisation.forms import (
    FLOATS,
    INVERSE,
    EightBitForm,
    TensorForm,
    WeightForm,
)
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.picture_spec import PatchSpec

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
