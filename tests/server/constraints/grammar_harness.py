"""The scheduler under a certifying executor, with real grammars over the demo model's tokens."""

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher

from loraplex.adapters.grammar.compile import compile_grammar
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.server.constraints.constraint import Constraint, Names, NameTokens, Thinking
from loraplex.server.constraints.rules import TokenRules
from loraplex.server.constraints.wishes import ConstraintNews, ConstraintWish
from loraplex.server.engine.drafts.draft import Draft, DraftOwner
from loraplex.server.engine.drafts.source import Drafts, DraftSource
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.protocol import GenerateRequest
from tests.server.constraints.serving import EOS, VOCAB, vocabulary
from tests.server.engine.harness import Harness

_CHANCE = 0.95


@cache
def compiled(grammar: str) -> LLMatcher:
    return compile_grammar(vocabulary(), grammar, ServedGrammarLimits())


@cache
def name_tokens() -> NameTokens:
    return NameTokens(vocabulary().tokens.by_id)


def constraint_of(wish: ConstraintWish) -> Constraint:
    """As `Constraints` makes it."""
    sampling = wish.sampling
    matcher = compiled(sampling.grammar).deep_copy() if sampling.grammar else None
    rules = TokenRules.of(sampling, EOS, VOCAB)
    end = vocabulary().tokenizer.eos_token
    watches: list[Names | Thinking] = []
    if sampling.names_once is not None:
        watches.append(Names(name_tokens(), sampling.names_once))
    if sampling.thinking is not None:
        watches.append(Thinking(sampling.thinking))
    found = Constraint(matcher, rules, sampling.min_tokens, end=end, watches=tuple(watches))
    deque(map(found.take, wish.accepted_ids), maxlen=0)
    return found


class KnownAnswers(DraftSource):
    """Drafts of answers that are known by their prompts; as many tokens are right as is asked."""

    def __init__(self, right_percent: int) -> None:
        super().__init__(1 << 20)
        self.right_percent = right_percent
        self.known: dict[tuple[int, ...], list[int]] = {}

    def open(self, owner: DraftOwner, token_ids: Sequence[int]) -> "KnownDrafts":
        return KnownDrafts(self, owner, token_ids)


class KnownDrafts(Drafts):
    def __init__(self, source: KnownAnswers, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        super().__init__(source, owner, token_ids)
        self._answers, self._prompt_ids = source, tuple(token_ids)

    def propose(self, most: int) -> Draft:
        count = self.num_tokens - len(self._prompt_ids)
        answer = self._answers.known.get(self._prompt_ids, [])[count : count + most]
        said = [self._said(count + i, token) for i, token in enumerate(answer)]
        return Draft(said, [_CHANCE] * len(said))

    def _said(self, index: int, token_id: int) -> int:
        is_right = (index * 37 + token_id) % 100 < self._answers.right_percent
        return token_id if is_right else (token_id + 1) % VOCAB


class GrammarHarness(Harness):
    """Masks of each third sequence cost more than a step has time for, if `has_costly`."""

    has_costly = False

    def _make_constraints(self) -> None:
        for wish in self.scheduler.grammars.take_wishes():
            constraint = constraint_of(wish)
            constraint.mask_s = float(self.has_costly and wish.key % 3 == 0)
            news = ConstraintNews(wish.key, constraint)
            self.scheduler.constraint_news(news, self.now)

    def know(self, source: KnownAnswers) -> None:
        """Drafts are of these answers from now on."""
        self.scheduler.drafting.source = source


def answer_alone(request: GenerateRequest, plain: Any, options: Any) -> list[int]:
    """Its output, without the tokens that it came with. plain: limits of the executor."""
    alone = GrammarHarness(plain, 1, SchedulerConfig(), options)
    key = alone.submit(request)
    alone.run()
    return alone.tokens(key)
