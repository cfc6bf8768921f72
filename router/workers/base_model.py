"""A base model that this router serves: its card, and the workers that may serve it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from loraplex.router.api.request.formatter import ApiLimits, limits_from
from loraplex.router.call import BASE_PLACEHOLDERS, RequestError
from loraplex.router.config import RouterConfig
from loraplex.router.tenancy.keys import Caller
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import CallersTurns, TurnTaking
from loraplex.router.workers.fleet import Fleet
from loraplex.router.workers.roster import Roster
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
