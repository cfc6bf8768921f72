"""The base models behind this router: cards and workers of each, and which one a card, a name or an
adapter belongs to."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.peft.validate import names_base
from loraplex.router.api.request.formatter import ApiLimits, limits_from
from loraplex.router.call import BASE_PLACEHOLDERS, RequestError, Secret
from loraplex.router.config import RouterConfig
from loraplex.router.names.served import Origin
from loraplex.router.tenancy.keys import Caller
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import CallersTurns, TurnTaking
from loraplex.router.workers.client import CardError
from loraplex.router.workers.fleet import Fleet, Roster
from loraplex.server.protocol import ModelCard

logger = logging.getLogger(__name__)


def agreed(newest: ModelCard, workers: Sequence[ModelCard]) -> ModelCard:
    """The card that workers of one base share: the newest one's words, the names of all, a common
    context. workers: their cards, at least one."""
    names = dict.fromkeys(name for card in workers for name in card.names)
    listed = dict.fromkeys(name for card in workers for name in card.listed or card.names[:1])
    least = min(card.max_context for card in workers)
    return msgspec.structs.replace(
        newest, names=tuple(names), listed=tuple(listed), max_context=least
    )


class BaseModel:
    """A base model that workers serve. There is no card until the first of them comes.

    Another model may take the place of one that is idle. Workers of one base may differ in their
    options, as during a rolling restart. name: as the operator declares it; "" = the only one,
    whatever it is. roster: its connected workers. fleet: brings sequences to them. turns: of all
    bases together. running: requests that it answers. beside: the router's other bases.
    """

    beside: Sequence["BaseModel"] = ()

    def __init__(
        self,
        config: RouterConfig,
        roster: Roster,
        fleet: Fleet,
        turns: TurnTaking,
        name: str = "",
    ) -> None:
        self.name = name
        self.fleet = fleet
        self._others = frozenset(config.bases) - {name}
        self._roster = roster
        self._config = config
        self._text: TextModel | None = None
        self._turns = turns
        self.running = 0
        self._limits = ApiLimits()
        self._adopting = asyncio.Lock()

    @property
    def text(self) -> TextModel | None:
        return self._text

    @property
    def limits(self) -> ApiLimits:
        """Limits of what bodies may ask for; without meaning before the first card. A further name
        that another base has, too, means neither."""
        limits, shared = self._limits, {name for base in self.beside for name in base.names}
        if shared.isdisjoint(limits.base_names):
            return limits
        own = (name for name in limits.base_names if name == self.name or name not in shared)
        return msgspec.structs.replace(limits, base_names=tuple(own))

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the base, as far as they are known; the first is shown."""
        return (self.name,) if self._text is None else self._text.card.names

    @property
    def listed(self) -> tuple[str, ...]:
        """The names under which lists of models have the base."""
        if self._text is None:
            return (self.name,)
        return self._text.card.listed or self._text.card.names[:1]

    def require(self) -> TextModel:
        """The base model's texts. Raises RequestError `unavailable` before the first card."""
        if self._text is None:
            of_base = f" of {self.name}" if self.name else ""
            message = f"no worker{of_base} has reported its model yet; try again soon"
            raise RequestError("unavailable", message)
        return self._text

    def require_for(self, caller: Caller) -> TextModel:
        """The same, whose work takes this caller's turns. Raises as `require`."""
        return self.require().taking(self.turns_of(caller))

    def turns_of(self, caller: Caller) -> CallersTurns:
        return self._turns.of(caller.tenant, caller.is_batch)

    def hold(self) -> Callable[[], None]:
        """Notes that a request begins to be answered by this model; call the result at its end."""
        self.running += 1
        return self._release

    def _release(self) -> None:
        self.running -= 1

    @property
    def _in_use(self) -> bool:
        """Whether something runs or waits that was tokenised for the model of now."""
        return bool(self.fleet.views) or self.running > 0

    async def adopt(self, card: ModelCard) -> str | None:
        """Serve this model from now on, as it and the others say; None = it is so. Returns why not,
        when they serve another base or the card's tokenizer cannot be used."""
        async with self._adopting:
            held = self._text
            is_same = held is not None and held.card.base_digest == card.base_digest
            if held is not None and not is_same and self._in_use:
                return (
                    f"it serves {card.names[0]} ({card.base_digest[:12]}), this router serves "
                    f"{held.card.names[0]} ({held.card.base_digest[:12]})"
                )
            return await self._serve(agreed(card, [card, *(self._roster.cards if is_same else ())]))

    async def review(self) -> None:
        """Computes the base anew when a worker has left: what it alone said counts no more."""
        async with self._adopting:
            others = self._roster.cards
            if self._text is not None and others:
                await self._serve(agreed(self._text.card, others))

    async def _serve(self, card: ModelCard) -> str | None:
        if self._text is not None and self._text.card == card:
            return None
        try:
            text = self._text = await asyncio.to_thread(TextModel, card)
        except ValueError as error:
            return str(error)
        self._limits = limits_from(
            self._config, self._names(card), card.sampling_defaults, card.gives, card.vocab_size
        )
        facts = (card.names[0], card.base_digest[:12], card.max_context)
        logger.info("serving %s (%s), contexts of up to %d tokens", *facts)
        for name, fault in text.templates.faults.items():
            logger.warning("%s cannot chat by its template %s: %s", card.names[0], name, fault)
        for name, form in text.templates.forms.items():
            logger.info("its chat template %s reads %s", name, form)
        return None

    def is_named(self, name: str) -> bool:
        """Whether a request that says `name` means the base."""
        known = () if self._text is None else self.limits.base_names
        return name in (self.name, *known, *BASE_PLACEHOLDERS)

    def _names(self, card: ModelCard) -> tuple[str, ...]:
        """Names of the base: a name that was given to an adapter never means the base."""
        registered = {text.partition("=")[0] for text in self._config.adapters}
        for name in registered.intersection(card.names):
            logger.warning("%s is the adapter registered so, not the base model of that name", name)
        return tuple(name for name in card.names if name not in registered | self._others)


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
