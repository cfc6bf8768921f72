"""A registered name and whose it is, and an adapter that a caller may use: what it is, and how a
worker comes by it. Pure."""

from collections.abc import Sequence

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.merge.recipe import MergeMember, MergeRecipe, make_recipe
from loraplex.adapters.ref import AdapterRef, format_ref
from loraplex.router.call import MergedChoice, Secret
from loraplex.router.policy.rollout import HeldContent
from loraplex.server.protocol import AdapterMerge, MemberSource, acting

_CHANGED_RETRY_S = 1.0


class OwnedName(msgspec.Struct, frozen=True, order=True):
    """A registered name and its owner. tenant: whose name it is; "" = the fleet's, which callers of
    every tenant may use.

    Equal names of two tenants are two names, and mean nothing to each other.
    """

    name: str
    tenant: str = ""

    def __str__(self) -> str:
        """The one spelling, for store, metrics and operators. No reference is written so."""
        return f"{self.tenant}::{self.name}" if self.tenant else self.name


class Merge(msgspec.Struct, frozen=True):
    """A recipe and its members: pinned reference and token of each."""

    recipe: MergeRecipe
    members: tuple[tuple[AdapterRef, Secret | None], ...]

    def frame(self, load_id: str) -> AdapterMerge:
        sources = (
            MemberSource(ref, None if token is None else str(token)) for ref, token in self.members
        )
        return AdapterMerge(load_id, self.recipe, tuple(sources))


# What a worker is asked to bring: a reference to fetch, or adapters to merge.
Origin = AdapterRef | Merge


def home_key(origin: Origin) -> str:
    """The key that ranks an adapter's homes. Every router knows it before the content is there."""
    return origin.recipe.digest if isinstance(origin, Merge) else format_ref(origin)


def uploads_of(origin: Origin) -> list[str]:
    """Digests of the uploads that an origin needs."""
    refs = [ref for ref, _ in origin.members] if isinstance(origin, Merge) else [origin]
    return [ref.name for ref in refs if ref.source == "upload"]


class ServedAdapter(msgspec.Struct, frozen=True):
    """An adapter that this caller may use now.

    origin: a pinned reference, or a merge. token: what opens the reference at its source.
    alias: the registered name that it was named by. rollout: of that name, under which this
    version was chosen; "" = none. tool_format: what its registration says; "" = nothing.
    scale: of the request's rows; the content knows nothing of it. base: see HeldContent.
    """

    adapter_id: str
    origin: Origin
    token: Secret | None
    manifest: AdapterManifest
    alias: OwnedName | None = None
    rollout: str = ""
    tool_format: str = ""
    scale: float = 1.0
    base: str = ""

    @property
    def held(self) -> HeldContent:
        return HeldContent(self.base, self.digest)

    @property
    def acting(self) -> str:
        return acting(self.digest, self.scale)

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def counted_as(self) -> str:
        """The name by which requests are counted. It is one name for all spellings of a registered
        one; else what the caller wrote."""
        return self.adapter_id if self.alias is None else self.alias.name


def merge_of(choice: MergedChoice, members: Sequence[ServedAdapter]) -> Merge:
    """The merge that is asked for. members: as they were found. Raises AdapterError."""
    weighted = [
        MergeMember(member.digest, weight)
        for member, weight in zip(members, choice.weights, strict=True)
    ]
    if len({member.base for member in members}) > 1:
        raise AdapterError("invalid", "adapters of several bases cannot be merged")
    recipe = make_recipe(weighted, choice.strategy, choice.density, choice.majority_sign_method)
    origins = {
        member.digest: (member.origin, member.token)
        for member in members
        if isinstance(member.origin, AdapterRef)
    }
    return Merge(recipe, tuple(origins[member.digest] for member in recipe.members))


def has_changed(error: AdapterError) -> bool:
    """Whether a worker found other content than the catalog remembers."""
    return any(violation.code == "digest_mismatch" for violation in error.violations)


def changed() -> AdapterError:
    """Makes the error for a caller whose adapter has other content at its source than the catalog
    remembers. Its code is `unavailable`, and it says when to try again.
    """
    message = "the adapter has just changed at its source; try again"
    return AdapterError("unavailable", message, (), _CHANGED_RETRY_S)
