"""The base model that this router serves: its card, and the workers that may serve it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from loraplex.router.api.request.formatter import ApiLimits, limits_from
from loraplex.router.call import BASE_PLACEHOLDERS, RequestError
from loraplex.router.config import RouterConfig
from loraplex.router.tenancy.keys import Caller
from loraplex.router.text.model import TextModel
from loraplex.router.text.turn_taking import TurnTaking
from loraplex.router.workers.roster import Roster
from loraplex.server.protocol import ModelCard

logger = logging.getLogger(__name__)


def agreed(newest: ModelCard, workers: Sequence[ModelCard]) -> ModelCard:
    """The card that workers of one base share: the newest one's words, the names of all, a common
    context.

    workers: their cards, at least one.
    """
    names = dict.fromkeys(name for card in workers for name in card.names)
    listed = dict.fromkeys(name for card in workers for name in card.listed or card.names[:1])
    least = min(card.max_context for card in workers)
    return msgspec.structs.replace(
        newest, names=tuple(names), listed=tuple(listed), max_context=least
    )


class BaseModel:
    """The base model that the workers serve. There is none until the first card.

    One base is there at a time; another may replace one that is idle. Workers of one base may
    differ in their options, as during a rolling restart. roster: of those that are connected.
    """

    def __init__(self, config: RouterConfig, roster: Roster) -> None:
        self._roster = roster
        self._config = config
        self._text: TextModel | None = None
        self._turns = TurnTaking()
        self._limits = ApiLimits()
        self._adopting = asyncio.Lock()

    @property
    def text(self) -> TextModel | None:
        return self._text

    @property
    def limits(self) -> ApiLimits:
        """Limits of what bodies may ask for; without meaning before the first card."""
        return self._limits

    def require(self) -> TextModel:
        """The base model's texts. Raises RequestError `unavailable` before the first card."""
        if self._text is None:
            raise RequestError(
                "unavailable", "no worker has reported its model yet; try again soon"
            )
        return self._text

    def require_for(self, caller: Caller) -> TextModel:
        """The same, whose work takes this caller's turns. Raises as `require`."""
        return self.require().taking(self._turns.of(caller.tenant, caller.is_batch))

    async def adopt(
        self, card: ModelCard, in_use: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Serve this model from now on, as it and the others say; None = it is so.

        in_use: whether workers are connected or requests are being answered, asked when it counts.
        Returns why not, when they serve another base or the card's tokenizer cannot be used.
        """
        async with self._adopting:
            held = self._text
            is_same = held is not None and held.card.base_digest == card.base_digest
            if held is not None and not is_same and in_use():
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
        known = () if self._text is None else self._limits.base_names
        return name in (*known, *BASE_PLACEHOLDERS)

    def _names(self, card: ModelCard) -> tuple[str, ...]:
        """Names of the base: a name that was given to an adapter never means the base."""
        registered = {text.partition("=")[0] for text in self._config.adapters}
        for name in registered.intersection(card.names):
            logger.warning("%s is the adapter registered so, not the base model of that name", name)
        return tuple(name for name in card.names if name not in registered)
