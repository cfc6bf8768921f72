"""Rows of the embedding and the head, and weights and biases of norms, that an adapter has in
place of the base's, in one batch.

They lie outside graphs, so the host knows whose tokens lie where. What is launched waits for
nothing, and costs other tokens nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, Protocol

import torch

from loraplex.server.model.spec.model_spec import NormSpec
from loraplex.server.model.weights import Norm, RmsNorm

# The logit of a token that an adapter does not have: never drawn, and finite in every dtype.
NEVER = -6e4


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows of an embedding or head that an adapter has of its own. rows: `[n, hidden]`. ids: int64
    `[n]`, the token of each; None = all tokens of the adapter's vocabulary, which may be smaller
    or larger than the base's. size: of that vocabulary. Of devices that share the base each has
    the rows of its tokens, perhaps none, and counts them as `loraplex.adapters.base` says.
    addends: what is added to the base's bias, `[vocab]` of the device; None = nothing is.
    """

    rows: torch.Tensor
    ids: torch.Tensor | None
    size: int
    addends: torch.Tensor | None = None

    def embed(self, token_ids: torch.Tensor, y: torch.Tensor) -> None:
        """Write own rows of the tokens over y `[tokens, hidden]`, which holds the base's rows."""
        if self.ids is None:
            # Padding of a step has any ids, and so may have some that the adapter does not know.
            known = token_ids.long().clamp(max=len(self.rows) - 1)
            torch.index_select(self.rows, 0, known, out=y)
            return
        if not len(self.rows):
            return
        same = token_ids[:, None] == self.ids
        own = self.rows[same.int().argmax(dim=1)]
        y.copy_(torch.where(same.any(dim=1, keepdim=True), own, y))

    def logits(self, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write own logits of x `[tokens, hidden]` over y `[tokens, vocab]`, which holds the
        base's; of the device's tokens. bias: of the base's head, whose rows are all replaced then.
        """
        if self.ids is None:
            own = torch.mm(x, self.rows.T, out=y[:, : len(self.rows)])
            if bias is not None:
                bias = bias if self.addends is None else bias + self.addends
                own.add_(bias[: len(self.rows)])
        else:
            y.index_copy_(1, self.ids, x @ self.rows.T)

    def forbid_others(self, y: torch.Tensor) -> None:
        """Forbid tokens that the adapter does not have, in finished logits y `[tokens, vocab]`."""
        y[:, self.size :] = NEVER


class NormParts(NamedTuple):
    """Tensors in place of those of a norm, `[features]` each. None = the base's."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def within(self, norm: Norm) -> Norm:
        """Return the norm with these parts."""
        weight = norm.weight if self.weight is None else self.weight
        if isinstance(norm, RmsNorm):
            return norm._replace(weight=weight)
        return norm._replace(weight=weight, bias=norm.bias if self.bias is None else self.bias)


class OwnParts(NamedTuple):
    """Rows and norms that an adapter has in place of the base's. rows: by site. norms: by place of
    the weight (`norm_place`).
    """

    rows: Mapping[int, OwnRows]
    norms: Mapping[int, NormParts]


@dataclass(frozen=True, slots=True)
class OwnSegment:
    """Tokens begin .. end of a batch have an adapter with parts of its own, as of OwnParts."""

    begin: int
    end: int
    by_site: Mapping[int, OwnRows]
    norms: Mapping[int, NormParts]


class Owning(Protocol):
    """Adapters of a batch, some of which may have parts of their own."""

    @property
    def own(self) -> tuple[OwnSegment, ...]: ...


def ids_on(device: torch.device, ids: tuple[int, ...] | None) -> torch.Tensor | None:
    """Copy token ids to the device as OwnRows has them, without waiting; None stays None."""
    if ids is None:
        return None
    found = torch.tensor(ids, dtype=torch.int64)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def norms_of(
    rows: torch.Tensor, places: Sequence[int], specs: Sequence[NormSpec | None]
) -> dict[int, NormParts]:
    """Return what an adapter has of norms. rows: as stored, `[places, numbers of the
    largest]`. specs: of all places. Work is queued on the current stream.
    """
    found: dict[int, NormParts] = {}
    for place, row in zip(places, rows, strict=True):
        spec, (is_bias, of_norm) = specs[place], divmod(place, len(specs) // 2)
        assert spec is not None
        own = row = row[: spec.numbers]
        if not is_bias and spec.offset:
            own = row.float() + spec.offset
            own = own if spec.kind == "rms" else own.to(row.dtype)
        parts = found.get(of_norm, NormParts())
        found[of_norm] = parts._replace(bias=own) if is_bias else parts._replace(weight=own)
    return found


def has_new_ids(segments: tuple[OwnSegment, ...], site: int, vocab: int) -> bool:
    """Whether some adapter has ids behind those of the base, of which there are `vocab`."""
    sizes = (segment.by_site[site].size for segment in segments if site in segment.by_site)
    return any(size > vocab for size in sizes)


def ids_of_base(
    segments: tuple[OwnSegment, ...], site: int, token_ids: torch.Tensor, vocab: int
) -> torch.Tensor:
    """The ids, any below `vocab` in place of those that an adapter alone has."""
    return token_ids.clamp(max=vocab - 1) if has_new_ids(segments, site, vocab) else token_ids


def widened(y: torch.Tensor, width: int) -> torch.Tensor:
    """Logits y `[tokens, vocab]` with columns for ids that adapters alone have, all improbable."""
    wide = y.new_full((len(y), width), NEVER)
    wide[:, : y.shape[1]] = y
    return wide


def embed_own(
    segments: tuple[OwnSegment, ...], site: int, token_ids: torch.Tensor, y: torch.Tensor
) -> None:
    for segment in segments:
        rows, part = segment.by_site.get(site), slice(segment.begin, segment.end)
        if rows is not None:
            rows.embed(token_ids[part], y[part])


def norm_own(
    segments: tuple[OwnSegment, ...],
    place: int,
    norm: Norm,
    hidden: torch.Tensor,
    normed: torch.Tensor,
    run: Callable[[torch.Tensor, Norm], torch.Tensor],
) -> None:
    """Norm again those rows whose adapter has its own weight or bias. norm: the base's. normed
    `[tokens, hidden]` holds that of hidden `[tokens, hidden]`, and is changed in place. run: norms.
    """
    for segment in segments:
        own, part = segment.norms.get(place), slice(segment.begin, segment.end)
        if own is not None:
            normed[part] = run(hidden[part], own.within(norm))


def own_heads(
    segments: tuple[OwnSegment, ...],
    places: tuple[int, int],
    of_base: torch.Tensor,
    of_q: int,
    tokens: int,
    part: Literal["weight", "bias"] = "weight",
) -> torch.Tensor:
    """Return tensors of the norms of q and k: the base's `[heads + kv_heads, head_dim]`, or those
    of each token, `[tokens, heads + kv_heads, head_dim]`, where some adapter has its own. places:
    of the weights of both norms. of_q: heads of q. part: of the norms.
    """
    found, of_both = of_base, [*zip(places, (slice(of_q), slice(of_q, None)), strict=True)]
    for segment, (place, heads) in product(segments, of_both):
        own = getattr(segment.norms.get(place), part, None)
        if own is not None:
            if found is of_base:
                found = of_base.expand(tokens, -1, -1).clone()
            found[segment.begin : segment.end, heads] = own.view(-1, of_base.shape[1])
    return found


def own_logits(
    segments: tuple[OwnSegment, ...],
    site: int,
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    one_by_one: bool = False,
) -> None:
    """Write adapters' own logits over those of the base. bias: of the base's head. one_by_one: a
    token's product is the same, however many tokens have the adapter."""
    for segment in segments:
        rows, begin, end = segment.by_site.get(site), segment.begin, segment.end
        if rows is not None:
            at_once = 1 if one_by_one else end - begin
            for first in range(begin, end, at_once):
                part = slice(first, first + at_once)
                rows.logits(x[part], y[part], bias)


def forbid_others(segments: tuple[OwnSegment, ...], site: int, y: torch.Tensor) -> None:
    for segment in segments:
        rows = segment.by_site.get(site)
        if rows is not None:
            rows.forbid_others(y[segment.begin : segment.end])
