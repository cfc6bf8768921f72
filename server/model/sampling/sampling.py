"""From logits to tokens: parameters of rows, penalties, truncation, the draw and logprobs, for many
rows at once.

Order (that of transformers where it has the processor): logit bias, repetition penalty, frequency
and presence penalties, suppressed ids, masks; the greedy choice here; then temperature, top_k,
top_p, min_p, typical_p, and a draw by inverse CDF in the order of token ids. When a sequence ends
is not decided here. Random numbers are Philox4x32-10 (Salmon et al., SC 2011), without state: rows,
batches and restarts cannot change a draw.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from loraplex.adapters.base import MAX_NEW_IDS
from loraplex.server.engine.admission import MAX_LOGPROB_TOKEN_IDS
from loraplex.server.engine.plan import RowStart
from loraplex.server.kernels.sampling import draw_columns
from loraplex.server.model.ops.transfers import to_device
from loraplex.server.model.sampling.masks import RowMasks
from loraplex.server.model.steps.rows import Rows
from loraplex.server.protocol import SamplingParams

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_NEVER = float("-inf")
# Past tokens of a row that are counted at once: what it takes does not grow with the context.
_COUNTED = 4096

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


def philox(counter: Words4, key: tuple[torch.Tensor, torch.Tensor]) -> Words4:
    """Four 32-bit words per element; all tensors int64 of one shape, values in 0 .. 2^32-1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, choice: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1), 52 bits fine. Arguments: int64 of one shape; seed is the 64-bit key."""
    zero = torch.zeros_like(index)
    counter = (index & _WORD, choice & _WORD, zero, zero)
    first, second, _, _ = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    bits = (first << 20) | (second >> 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of a 32 x 32 bit product, in halves so that no int64 overflows."""
    low = a * (b & 0xFFFF)
    high = a * (b >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


@dataclass(frozen=True, slots=True)
class Entries:
    """Sparse entries of the logits: rows, ids int64 `[n]`; values float32 `[n]`."""

    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows whose past tokens count. rows: int64 `[p]`. tokens: int32 `[p, length]`, padded.

    prompt_len, length: int64 `[p]`, of the prompt and of all tokens. repetition (over both),
    frequency, presence (over the output): float32 `[p]`.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    prompt_len: torch.Tensor
    length: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True)
class History:
    """Changes of logits before a choice, each of the rows that need it; None = none."""

    bias: Entries | None = None
    penalties: Penalties | None = None
    suppressed: Entries | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rows that cut their distribution. rows, top_k (0 = off): int64 `[t]`; others float32."""

    rows: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class Typical:
    """Rows that keep typical tokens alone. rows: int64 `[t]`; mass: float32 `[t]`."""

    rows: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True, slots=True)
class Allowed:
    """Rows that may draw some tokens alone. rows: int64 `[k]`. bits: int32 `[k, ceil(vocab / 32)]`;
    bit i % 32 of word i // 32 is set where id i may be drawn."""

    rows: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of the rows of one step.

    temperature: float32 `[rows]`, 0 = greedy; seed, choice, index: int64 `[rows]`. allowed,
    truncation, typical: only the rows that need them; None = none does.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    choice: torch.Tensor
    index: torch.Tensor
    any_random: bool
    history: History
    allowed: Allowed | None = None
    truncation: Truncation | None = None
    typical: Typical | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that were sampled. token_ids: int64 `[rows]`. failed: bool `[rows]`, no token could be
    chosen (its id is 0). logits: float32 `[rows, vocab]`, whose softmax the draw used: minus
    infinity for what is cut off. Those of a greedy row are before temperature and truncation.
    """

    token_ids: torch.Tensor
    failed: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities from the logits.

    chosen: float32 `[rows]`; top_ids, top: `[rows, n]`, most likely first. ranks: of the chosen,
    int64 `[rows]`, where they are counted. listed: `[rows, m]`, of further ids that were asked for.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor
    ranks: torch.Tensor | None = None
    listed: torch.Tensor | None = None


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Sample a token for each row. logits: float32 `[rows, vocab]`, changed in place."""
    failed = ~torch.isfinite(logits).all(dim=-1)
    apply_history(logits, batch.history)
    if batch.allowed is not None:
        apply_masks(logits, batch.allowed)
    token_ids = logits.argmax(dim=-1)
    failed |= ~torch.isfinite(logits.gather(1, token_ids[:, None])).squeeze(1)
    if batch.any_random:
        logits = _warp(logits, batch)
        token_ids = torch.where(batch.temperature > 0, _draw(logits, batch), token_ids)
    return Sampled(token_ids.masked_fill(failed, 0), failed, logits)


def logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, top: int, listed: torch.Tensor | None = None
) -> Logprobs:
    """Compute logprobs of tokens, and of the most likely ones. logits: float32 `[rows, vocab]`;
    token_ids: int64 `[rows]`; listed: further ids, int64 `[rows, m]`.
    """
    scores = _log_softmax(logits)
    best = scores.topk(min(top, scores.shape[1]), dim=-1)
    chosen = scores.gather(1, token_ids[:, None]).squeeze(1)
    asked = None if listed is None else scores.gather(1, listed)
    return Logprobs(chosen, best.indices, best.values, listed=asked)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm of each row's softmax. A GPU divides a row's sum by where the row
    begins within 16 bytes: all rows begin alike here, so no row depends on its place."""
    vocab = logits.shape[1]
    missing = -vocab % 4
    if missing:
        logits = functional.pad(logits, (0, missing), value=_NEVER)
    return logits.log_softmax(dim=-1)[:, :vocab]


def ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """1 + the number of likelier tokens, int64 `[rows]`. Arguments as of `logprobs`."""
    return (logits > logits.gather(1, token_ids[:, None])).sum(dim=-1) + 1


def apply_history(logits: torch.Tensor, history: History) -> None:
    """Apply bias, penalties, suppressed tokens to float32 `[rows, vocab]`, in place."""
    if history.bias is not None:
        bias = history.bias
        logits.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)
    if history.penalties is not None:
        rows = history.penalties.rows
        logits[rows] = _penalise(logits[rows], history.penalties)
    if history.suppressed is not None:
        logits[history.suppressed.rows, history.suppressed.ids] = _NEVER


def apply_masks(logits: torch.Tensor, allowed: Allowed) -> None:
    """Forbid tokens that masks do not allow. logits: float32 `[rows, vocab]`, changed in place."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    octets = allowed.bits.view(torch.uint8)[:, :, None]
    mask = ((octets >> bits) & 1).view(torch.bool).flatten(1)[:, : logits.shape[1]]
    logits[allowed.rows] = logits[allowed.rows].masked_fill(~mask, _NEVER)


def _penalise(logits: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    seen, counts = _count(penalties, logits.shape[1])
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, repeated, logits)
    logits = logits - penalties.frequency[:, None] * counts
    return logits - penalties.presence[:, None] * (counts > 0)


def _count(penalties: Penalties, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the tokens that penalties are for: `[p, vocab]`: which ids were seen at all, bool; how
    often in the output, float32.
    """
    count, device = len(penalties.rows), penalties.tokens.device
    # One column more takes in what does not count.
    seen = torch.zeros(count, vocab + 1, dtype=torch.bool, device=device)
    counts = torch.zeros(count, vocab + 1, device=device)
    for begin in range(0, penalties.tokens.shape[1], _COUNTED):
        tokens = penalties.tokens[:, begin : begin + _COUNTED].long()
        places = begin + torch.arange(tokens.shape[1], device=device)
        known = places < penalties.length[:, None]
        output = known & (places >= penalties.prompt_len[:, None])
        seen.scatter_(1, tokens.where(known, vocab), True)
        counts.scatter_add_(1, tokens.where(output, vocab), output.float())
    return seen[:, :vocab], counts[:, :vocab]


def _warp(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Temperature, and -inf for what is cut off. Greedy rows keep their softmax."""
    heat = batch.temperature.where(batch.temperature > 0, 1.0)
    # Relative to the best, so that a tiny temperature cannot overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / heat[:, None]
    if batch.truncation is not None:
        rows = batch.truncation.rows
        logits[rows] = _truncate(logits[rows], batch.truncation)
    if batch.typical is not None:
        rows = batch.typical.rows
        logits[rows] = _keep_typical(logits[rows], batch.typical.mass)
    return logits


def _truncate(logits: torch.Tensor, cut: Truncation) -> torch.Tensor:
    """Equal logits are kept or cut off together. logits: relative to each row's best."""
    vocab = logits.shape[1]
    descending = logits.sort(dim=-1, descending=True).values
    top_k = cut.top_k.where(cut.top_k > 0, vocab).clamp(max=vocab)
    floor = descending.gather(1, top_k[:, None] - 1)
    descending = descending.masked_fill(descending < floor, _NEVER)
    better = descending.softmax(dim=-1).cumsum(dim=-1) < cut.top_p[:, None]
    last = better.sum(dim=-1, keepdim=True).clamp(max=vocab - 1)
    nucleus = descending.gather(1, last).where(cut.top_p[:, None] < 1, _NEVER)
    cut_off = (logits < floor) | (logits < nucleus) | (logits.exp() < cut.min_p[:, None])
    return logits.masked_fill(cut_off, _NEVER)


def _keep_typical(logits: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Locally typical sampling (arXiv 2202.00666): nearest to the expected information first."""
    normalised = logits.log_softmax(dim=-1)
    entropy = -(normalised * normalised.exp()).nansum(dim=-1, keepdim=True)
    distance, ids = (-normalised - entropy).abs().sort(dim=-1)
    cumulative = logits.gather(1, ids).softmax(dim=-1).cumsum(dim=-1)
    last = (cumulative < mass[:, None]).sum(dim=-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    dropped = distance > distance.gather(1, last)
    dropped[:, 0] = False
    return logits.masked_fill(torch.empty_like(dropped).scatter_(1, ids, dropped), _NEVER)


def _draw(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw the first id whose cumulative probability passes the row's uniform number."""
    probabilities = logits.softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniform(batch.seed, batch.choice, batch.index)[:, None] * total
    # Rounding must not lift the target to the total, beyond the last possible token.
    target = torch.minimum(target, total * (1 - 2.0**-53))
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return drawn.clamp(max=logits.shape[1] - 1)


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
