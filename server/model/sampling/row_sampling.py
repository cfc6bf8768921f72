"""Sampling parameters of every running sequence, and the SamplingBatch of those that sample now."""

from collections.abc import Iterable

import numpy as np
import torch

from loraplex.adapters.base import MAX_NEW_IDS
from loraplex.server.engine.admission import MAX_LOGPROB_TOKEN_IDS
from loraplex.server.engine.plan import RowStart
from loraplex.server.kernels.sampling import draw_columns
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.sampling.masks import RowMasks
from loraplex.server.model.sampling.sampling import (
    Allowed,
    Entries,
    History,
    Penalties,
    SamplingBatch,
    Truncation,
    Typical,
)
from loraplex.server.model.steps.rows import Rows
from loraplex.server.protocol import SamplingParams

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
_FLOAT_COLUMNS = {
    draw_columns.TEMPERATURE: "temperature",
    draw_columns.TOP_P: "top_p",
    draw_columns.MIN_P: "min_p",
}
_SEED_BITS = 0xFFFFFFFFFFFFFFFF
_NONE = -1


class RowSampling:
    """Sampling parameters of all rows. One entry a row; host arrays, gathered for the rows of a
    step without a loop over them.

    processed: bool `[rows]`, whose logprobs are those that its draws use.
    table: int32 `[rows + 1, 8]` on the device, the columns of
    `loraplex.server.kernels.sampling.draw_columns`; the last row is no sequence's.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.vocab_size, self._most_ids = vocab_size, vocab_size + MAX_NEW_IDS
        self.eos_token_ids = eos_token_ids
        self.device = device
        self.table = torch.zeros(
            max_rows + 1, draw_columns.DRAW_COLUMNS, dtype=torch.int32, device=device
        )
        self.logprobs = np.full(max_rows, _NONE, dtype=np.int64)
        self.prompt_logprobs = np.full(max_rows, _NONE, dtype=np.int64)
        self.processed = np.zeros(max_rows, dtype=bool)
        self.num_listed = np.zeros(max_rows, dtype=np.int64)
        self._listed = np.zeros((max_rows, MAX_LOGPROB_TOKEN_IDS), dtype=np.int64)
        self._floats = {name: np.zeros(max_rows, dtype=np.float32) for name in _FLOATS}
        self._top_k = np.zeros(max_rows, dtype=np.int64)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._choice = np.zeros(max_rows, dtype=np.int64)
        self._suppressed_until = np.zeros(max_rows, dtype=np.int64)
        self._suppressed: dict[int, np.ndarray] = {}
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._has_bias = np.zeros(max_rows, dtype=bool)
        self._truncates = np.zeros(max_rows, dtype=bool)
        self._typical = np.zeros(max_rows, dtype=bool)
        self._penalised = np.zeros(max_rows, dtype=bool)
        self._plain = np.ones(max_rows, dtype=bool)

    def start(self, rows: Iterable[RowStart]) -> None:
        starts = list(rows)
        for start in starts:
            row, params = start.seq_row, start.sampling
            num_ids = start.vocab_size or self.vocab_size
            for name in _FLOATS:
                self._floats[name][row] = getattr(params, name)
            self._top_k[row] = params.top_k
            self._seed[row] = start.seed & _SEED_BITS
            self._choice[row] = start.choice
            self.logprobs[row] = _NONE if params.logprobs is None else params.logprobs
            wanted = params.prompt_logprobs
            self.prompt_logprobs[row] = _NONE if wanted is None else wanted
            self.processed[row] = params.processed_logprobs and params.logprobs is not None
            listed = params.logprob_token_ids
            self.num_listed[row], self._listed[row] = len(listed), 0
            self._listed[row, : len(listed)] = listed
            self._suppressed_until[row] = start.eos_suppressed_until
            ends = (*self.eos_token_ids, *params.end_token_ids, *params.stop_token_ids)
            known = sorted({i for i in ends if 0 <= i < num_ids})
            self._suppressed[row] = np.array(known, dtype=np.int64)
            self._start_bias(row, params, num_ids)
            self._set_flags(row, params)
        if starts:
            self._write_table(starts)

    def _write_table(self, starts: list[RowStart]) -> None:
        seq_rows = np.array([start.seq_row for start in starts])
        columns = np.empty((len(starts), draw_columns.DRAW_COLUMNS), dtype=np.int32)
        for column, name in _FLOAT_COLUMNS.items():
            columns[:, column] = self._floats[name][seq_rows].view(np.int32)
        columns[:, draw_columns.TOP_K] = np.minimum(self._top_k[seq_rows], self._most_ids)
        halves = self._seed[seq_rows].view(np.int32).reshape(-1, 2)
        columns[:, draw_columns.SEED_LOW : draw_columns.SEED_HIGH + 1] = halves
        columns[:, draw_columns.CHOICE] = self._choice[seq_rows]
        columns[:, draw_columns.PROMPT_LEN] = [start.prompt_len for start in starts]
        values = to_device(columns, self.device)
        self.table.index_copy_(0, to_device(seq_rows, self.device), values)

    def _start_bias(self, row: int, params: SamplingParams, num_ids: int) -> None:
        bias = {i: b for i, b in params.logit_bias.items() if 0 <= i < num_ids}
        self._has_bias[row] = bool(bias)
        self._bias[row] = (
            np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        )

    def _set_flags(self, row: int, params: SamplingParams) -> None:
        sampled = params.temperature > 0
        cuts = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._truncates[row] = sampled and cuts
        self._typical[row] = sampled and params.typical_p < 1
        self._penalised[row] = (
            params.repetition_penalty != 1
            or params.frequency_penalty != 0
            or params.presence_penalty != 0
        )
        asks = sampled or self._penalised[row] or self._has_bias[row]
        self._plain[row] = not asks and params.logprobs is None

    def listed(self, seq_rows: np.ndarray) -> torch.Tensor | None:
        """Return the ids whose logprobs are asked for, int64 `[n, most]`: each row's
        `logprob_token_ids`, padded with 0; None = no row has any.
        """
        most = int(self.num_listed[seq_rows].max(initial=0))
        return self._tensor(self._listed[seq_rows, :most]) if most else None

    def is_plain(self, rows: Rows, seq_rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Say which rows are plain, bool `[n]`: the next token is the one of the largest raw logit,
        and nothing else is wanted. Arguments as for `batch`.
        """
        index = lengths - rows.prompt_len[seq_rows]
        plain: np.ndarray = self._plain[seq_rows] & (index >= self._suppressed_until[seq_rows])
        return plain

    def special(
        self, rows: Rows, seq_rows: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Say which rows are special, bool `[n]` each: which ask for typical_p, and which for any
        term of `history`.
        """
        index = lengths - rows.prompt_len[seq_rows]
        history = self._penalised[seq_rows] | self._has_bias[seq_rows]
        history |= index < self._suppressed_until[seq_rows]
        return self._typical[seq_rows], history

    def batch(
        self,
        rows: Rows,
        seq_rows: np.ndarray,
        lengths: np.ndarray,
        masks: RowMasks | None = None,
    ) -> SamplingBatch:
        """Gather the parameters of rows that sample. seq_rows, lengths: int64 `[n]`, the rows that
        sample, and the tokens each has now. masks: what they may draw, None = any token.
        """
        index = lengths - rows.prompt_len[seq_rows]
        temperature = self._floats["temperature"][seq_rows]
        return SamplingBatch(
            temperature=self._tensor(temperature),
            seed=self._tensor(self._seed[seq_rows].view(np.int64)),
            choice=self._tensor(self._choice[seq_rows]),
            index=self._tensor(index),
            any_random=bool((temperature > 0).any()),
            history=self.history(rows, seq_rows, lengths, masks),
            allowed=None if masks is None else self._allowed(masks),
            truncation=self._truncation(seq_rows),
            typical=self._typical_rows(seq_rows),
        )

    def history(
        self,
        rows: Rows,
        seq_rows: np.ndarray,
        lengths: np.ndarray,
        masks: RowMasks | None = None,
    ) -> History:
        """Arguments as for `batch`. Where a mask allows suppressed ids alone, none is suppressed:
        the row would have no token to draw."""
        index = lengths - rows.prompt_len[seq_rows]
        return History(
            bias=self._bias_entries(seq_rows),
            penalties=self._penalties(rows, seq_rows, lengths),
            suppressed=self._suppressed_entries(seq_rows, index, masks),
        )

    def _bias_entries(self, seq_rows: np.ndarray) -> Entries | None:
        places = np.flatnonzero(self._has_bias[seq_rows])
        if not places.size:
            return None
        parts = [self._bias[int(row)] for row in seq_rows[places]]
        return self._entries(places, [ids for ids, _ in parts], [values for _, values in parts])

    def _suppressed_entries(
        self, seq_rows: np.ndarray, index: np.ndarray, masks: RowMasks | None
    ) -> Entries | None:
        places: list[int] = []
        ids: list[np.ndarray] = []
        for place in np.flatnonzero(index < self._suppressed_until[seq_rows]).tolist():
            suppressed = self._suppressed[int(seq_rows[place])]
            if masks is None or masks.allows_others(place, suppressed, self.vocab_size):
                places.append(place)
                ids.append(suppressed)
        if not places:
            return None
        values = [np.zeros(len(i), dtype=np.float32) for i in ids]
        return self._entries(np.array(places), ids, values)

    def _entries(
        self, places: np.ndarray, ids: list[np.ndarray], values: list[np.ndarray]
    ) -> Entries:
        rows = np.repeat(places, [len(i) for i in ids])
        return Entries(
            self._tensor(rows),
            self._tensor(np.concatenate(ids)),
            self._tensor(np.concatenate(values)),
        )

    def _penalties(self, rows: Rows, seq_rows: np.ndarray, lengths: np.ndarray) -> Penalties | None:
        places = np.flatnonzero(self._penalised[seq_rows])
        if not places.size:
            return None
        chosen = seq_rows[places]
        longest = int(lengths[places].max())
        return Penalties(
            rows=self._tensor(places),
            tokens=rows.tokens[self._tensor(chosen), :longest],
            prompt_len=self._tensor(rows.prompt_len[chosen]),
            length=self._tensor(lengths[places]),
            repetition=self._gather("repetition_penalty", chosen),
            frequency=self._gather("frequency_penalty", chosen),
            presence=self._gather("presence_penalty", chosen),
        )

    def _allowed(self, masks: RowMasks) -> Allowed | None:
        places = np.flatnonzero(masks.of >= 0)
        if not places.size:
            return None
        return Allowed(self._tensor(places), masks.bits[self._tensor(masks.of[places])])

    def _truncation(self, seq_rows: np.ndarray) -> Truncation | None:
        places = np.flatnonzero(self._truncates[seq_rows])
        if not places.size:
            return None
        chosen = seq_rows[places]
        return Truncation(
            rows=self._tensor(places),
            top_k=self._tensor(self._top_k[chosen]),
            top_p=self._gather("top_p", chosen),
            min_p=self._gather("min_p", chosen),
        )

    def _typical_rows(self, seq_rows: np.ndarray) -> Typical | None:
        places = np.flatnonzero(self._typical[seq_rows])
        if not places.size:
            return None
        return Typical(self._tensor(places), self._gather("typical_p", seq_rows[places]))

    def _gather(self, name: str, rows: np.ndarray) -> torch.Tensor:
        return self._tensor(self._floats[name][rows])

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self.device)
