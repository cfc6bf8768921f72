"""How an adapter with missing targeted modules is reported. Pure."""

import msgspec

from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.names.registration import Registration


class PartialObject(msgspec.Struct, frozen=True):
    """Modules and layers that have weights, of those that the adapter's config targets.

    layers: how many have some weights. message: the same in words.
    """

    modules: int
    targeted_modules: int
    layers: int
    targeted_layers: int
    message: str


def partial_of(manifest: AdapterManifest) -> PartialObject | None:
    """None: nothing is missing."""
    coverage = manifest.partial
    if coverage is None:
        return None
    return PartialObject(
        modules=coverage.modules,
        targeted_modules=coverage.targeted,
        layers=coverage.num_layers,
        targeted_layers=coverage.targeted_layers,
        message=coverage.text,
    )


def partial_object(registration: Registration) -> PartialObject | None:
    """Of what a name means; None also while that is not known."""
    content = registration.content
    return None if content is None else partial_of(content.manifest)


def partial_note(registration: Registration) -> str:
    """What a load's answer in plain text ends with; "" where nothing is missing."""
    found = partial_object(registration)
    return "" if found is None else f" It is {found.message}."
