"""Weights and inputs of products as a start's options make them. Pure."""

from collections.abc import Collection

from msgspec.structs import replace

from loraplex.server.config import Activations, AtLoad, ConfigError
from loraplex.server.model.quantisation.forms import (
    EightBitForm,
    FourBitForm,
    InputForm,
    WeightForm,
)
from loraplex.server.model.quantisation.quantisation import Quantisation, of_every_module
from loraplex.server.model.spec.model_spec import ModelSpec

_FP8_AT_LOAD = EightBitForm("fp8", "channel", inputs=InputForm("token"))
_FORMS: dict[AtLoad, tuple[str, WeightForm]] = {
    "fp8": ("FP8, a scale for each output, at load", _FP8_AT_LOAD),
    "nf4": ("NF4 in blocks of 64, at load", FourBitForm("nf4")),
}


def form_at_load(scheme: AtLoad, quantisation: Quantisation | None = None) -> WeightForm:
    """Return the form of matrices that are quantised at load. quantisation: of the model that
    `served_as` gives, perhaps.
    """
    found = None if quantisation is None else quantisation.form("")
    return _FORMS[scheme][1] if found is None else found


def served_as(
    model: ModelSpec,
    scheme: AtLoad | None = None,
    activations: Activations = "auto",
    picture_memory: int = 1,
) -> ModelSpec:
    """Return the model with the weights and inputs that `--quantize` and `--activations` ask for.
    Without `--picture-memory` it reads no pictures. Raises ConfigError where the checkpoint is to
    be quantised, and is so already.
    """
    if not picture_memory:
        model = replace(model, pictures=None)
    if scheme is not None:
        if model.quantisation is not None:
            raise ConfigError(
                f"--quantize {scheme}: the model's weights are quantised already"
                f" ({model.quantisation.scheme})"
            )
        model = replace(model, quantisation=of_every_module(*_FORMS[scheme]))
    return model if activations == "auto" else with_inputs_as_they_are(model, ("fp8", "int8"))


def with_inputs_as_they_are(model: ModelSpec, numbers: Collection[str]) -> ModelSpec:
    """Return the model whose inputs are not rounded to these numbers: `fp8`, `int8`. Nor are those
    of its encoder of pictures."""
    if model.pictures is not None:
        tower = with_inputs_as_they_are(model.pictures.tower, numbers)
        model = replace(model, pictures=replace(model.pictures, tower=tower))
    if model.quantisation is None:
        return model
    rules = tuple(
        replace(rule, form=_of_weights_alone(rule.form, numbers))
        for rule in model.quantisation.rules
    )
    return replace(model, quantisation=replace(model.quantisation, rules=rules))


def _of_weights_alone(form: WeightForm | None, numbers: Collection[str]) -> WeightForm | None:
    if not isinstance(form, EightBitForm) or form.inputs is None:
        return form
    return replace(form, inputs=None) if form.inputs.numbers in numbers else form
