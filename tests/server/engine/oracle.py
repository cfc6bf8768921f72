"""Drafts of an executor whose tokens are certificates: they are right as often as is asked for."""

from collections.abc import Sequence

from loraplex.server.engine.drafts.draft import Draft, DraftOwner
from loraplex.server.engine.drafts.source import Drafts, DraftSource
from loraplex.server.protocol import acting
from tests.certifying.certificates import CertifyOptions, certified_output

_CHANCE = 0.95


class OracleSource(DraftSource):
    def __init__(self, options: CertifyOptions, right_percent: int) -> None:
        super().__init__(0)
        self.options, self.right_percent = options, right_percent

    def open(self, owner: DraftOwner, token_ids: Sequence[int]) -> "OracleDrafts":
        return OracleDrafts(self, owner, token_ids)


class OracleDrafts(Drafts):
    def __init__(self, source: OracleSource, owner: DraftOwner, token_ids: Sequence[int]) -> None:
        super().__init__(source, owner, token_ids)
        self._oracle, self._prompt_ids = source, list(token_ids)

    def propose(self, most: int) -> Draft:
        """The next tokens; each is a wrong one as often as the source says."""
        count = self.num_tokens - len(self._prompt_ids)
        options, owner = self._oracle.options, self._owner
        adapter = acting(owner.adapter, owner.scale) if owner.adapter else None
        output = certified_output(adapter, self._prompt_ids, count + most, options)
        said = [self._said(count + i, token) for i, token in enumerate(output[count:])]
        return Draft(said, [_CHANCE] * len(said))

    def _said(self, index: int, token_id: int) -> int:
        is_right = (index * 37 + token_id) % 100 < self._oracle.right_percent
        return token_id if is_right else (token_id + 1) % self._oracle.options.vocab_size
