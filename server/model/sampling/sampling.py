"""From logits to tokens: penalties, truncation, the draw and logprobs, for many rows at once.

Order (that of transformers where it has the processor): logit bias, repetition penalty, frequency
and presence penalties, suppressed ids, masks; the greedy choice here; then temperature, top_k,
top_p, min_p, typical_p, and a draw by inverse CDF in the order of token ids. When a sequence ends
is not decided here.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from loraplex.server.model.sampling.philox import uniform

_NEVER = float("-inf")
# Past tokens of a row that are counted at once: what it takes does not grow with the context.
_COUNTED = 4096


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
