"""Weights in floating point that are quantised when they are loaded. Pure."""

from msgspec.structs import replace

from loraplex.server.config import AtLoad, ConfigError
from loraplex.server.model.quantisation.forms import EightBitForm, FourBitForm, WeightForm
from loraplex.server.model.quantisation.quantisation import of_every_module
from loraplex.server.model.spec.model_spec import ModelSpec

_FORMS: dict[AtLoad, tuple[str, WeightForm]] = {
    "fp8": ("FP8, a scale for each output, at load", EightBitForm("fp8", "channel")),
    "nf4": ("NF4 in blocks of 64, at load", FourBitForm("nf4")),
}


def quantised_at_load(model: ModelSpec, scheme: AtLoad | None) -> ModelSpec:
    """Return the model with what its layers' matrices become. Raises ConfigError where the
    checkpoint is quantised already.
    """
    if scheme is None:
        return model
    if model.quantisation is not None:
        raise ConfigError(
            f"--quantize {scheme}: the model's weights are quantised already"
            f" ({model.quantisation.scheme})"
        )
    return replace(model, quantisation=of_every_module(*_FORMS[scheme]))
