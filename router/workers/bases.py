"""The base models behind this router: which one a card, a name or an adapter belongs to."""

from collections.abc import Iterator, Sequence

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.peft.validate import names_base
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import Secret
from loraplex.router.names.served import Origin
from loraplex.router.workers.base_model import BaseModel
from loraplex.router.workers.fleet import Fleet
from loraplex.router.workers.model_card import CardError
from loraplex.server.protocol import ModelCard


class Bases:
    """The bases of one router, in the operator's order. One without a name is the only one.

    all: at least one. A base stays known while it has no workers.
    """

    def __init__(self, all: Sequence[BaseModel]) -> None:
        self.all = tuple(all)
        self.first = self.all[0]
        self._by_name = {base.name: base for base in self.all}
        for base in self.all:
            base.beside = [other for other in self.all if other is not base]

    def __iter__(self) -> Iterator[BaseModel]:
        return iter(self.all)

    @property
    def fleets(self) -> list[Fleet]:
        return [base.fleet for base in self.all]

    @property
    def have_names(self) -> bool:
        """Whether the operator declared them."""
        return bool(self.first.name)

    @property
    def are_several(self) -> bool:
        return len(self.all) > 1

    @property
    def ready(self) -> bool:
        """Whether some base takes work."""
        return any(base.fleet.ready and base.text is not None for base in self.all)

    @property
    def likeliest(self) -> BaseModel:
        """The base to ask of what no base is known for: the first one with workers."""
        return next((base for base in self.all if base.fleet.ready), self.first)

    def of(self, name: str) -> BaseModel:
        """The base of this name. Of one that is declared no more, or "": the first."""
        return self.find(name) or self.first

    def find(self, name: str) -> BaseModel | None:
        """The base of exactly this name, if one is declared."""
        return self._by_name.get(name)

    def of_card(self, card: ModelCard) -> BaseModel:
        """The base whose workers have this card. Raises CardError if there is no such base."""
        if self.first.name == "":
            return self.first
        for name in card.names:
            if name in self._by_name:
                return self._by_name[name]
        served = ", ".join(self._by_name)
        raise CardError(f"it serves {card.names[0]}, this router serves {served} (--base)")

    def named(self, name: str) -> BaseModel | None:
        """The base that a request means by this name; None for a name of no base."""
        if name and name in self._by_name:
            return self._by_name[name]
        return next((base for base in self.all if name in base.limits.base_names), None)

    def is_named(self, name: str) -> bool:
        """Whether a request that says `name` means a base."""
        return any(base.is_named(name) for base in self.all)

    def trained_on(self, name: str) -> BaseModel | None:
        """The base that an adapter's config names. None for a name of no base, and for ""."""
        if not name:
            return None
        exact = (base for base in self.all if name in base.names)
        alike = (base for base in self.all if names_base(name, (base.name, *base.names)))
        return self.find(name) or next(exact, None) or next(alike, None)

    def limits(self) -> ApiLimits:
        """Limits that no body breaks which some base would take."""
        limits = [base.limits for base in self.all if base.text is not None]
        if not limits or not self.are_several:
            return self.first.limits
        gives = dict.fromkeys(gift for one in limits for gift in one.gives)
        vocab_size = max(one.vocab_size for one in limits)
        return msgspec.structs.replace(limits[0], gives=tuple(gives), vocab_size=vocab_size)

    async def load(
        self, origin: Origin, token: Secret | None, wanted: str
    ) -> tuple[AdapterManifest, str]:
        """Lets a worker fetch or merge an adapter, which its config's base has. wanted: the base
        that must have it; "" = its config says, and the first has what names none. Returns the
        base's name, too. Raises AdapterError.
        """
        asked = self.of(wanted) if wanted else self.likeliest
        try:
            manifest = await asked.fleet.load_adapter(origin, token)
            other = asked if wanted else self.trained_on(manifest.base) or self.first
        except AdapterError as error:
            if wanted:
                raise
            names_none = error.code == "invalid" and not error.trained_for
            trained = self.first if names_none else await self._awaited(error.trained_for)
            if trained is None or trained is asked:
                raise
            other = trained
        if other is asked:
            return manifest, asked.name
        return await other.fleet.load_adapter(origin, token), other.name

    async def _awaited(self, name: str) -> BaseModel | None:
        """As `trained_on`, but waits for bases without a card: workers know further names. Raises
        AdapterError (unavailable).
        """
        for base in self.all:
            if name and base.text is None and self.trained_on(name) is None:
                await base.fleet.until_loads()
        return self.trained_on(name)

    def pause(self) -> None:
        """Holds what waits in the queues until `resume`. What runs goes on."""
        for base in self.all:
            base.fleet.pause()

    def resume(self) -> None:
        for base in self.all:
            base.fleet.resume()

    @property
    def paused(self) -> bool:
        return self.first.fleet.paused

    async def until_idle(self) -> None:
        """Waits until no sequence runs, or the pause is over."""
        for base in self.all:
            await base.fleet.until_idle()
