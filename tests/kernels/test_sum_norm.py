"""Sums of what several devices computed; here the devices are parts of one device's memory."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional

from loraplex.server.kernels.lora.pending import PendingDelta
from loraplex.server.kernels.pointwise.shared_terms import SharedTerms
from loraplex.server.kernels.pointwise.sum_norm import sum_norm
from tests.kernels.batches import SITE, Adapters

EPSILON = 1e-5
ROWS, MOST_ROWS = 6, 9
# The second adapter does not touch the site, the third slot has none.
SLOTS = [0, -1, 1, 2, 0, 0]
HAS_DELTA = [0, 4, 5]


@dataclass(frozen=True, slots=True)
class Devices:
    """Terms and hidden states of each; where no adapter wrote, deltas are NaN."""

    terms: list[SharedTerms]
    hidden: list[torch.Tensor]
    total: torch.Tensor

    @classmethod
    def make(
        cls, count: int, features: int, device: torch.device, *, deltas: bool, meet: bool
    ) -> "Devices":
        memory = torch.full((count, 2, MOST_ROWS, features), float("nan"), device=device)
        memory[:, 0, :ROWS] = torch.randn(count, ROWS, features, device=device)
        memory[:, 1, HAS_DELTA] = torch.randn(count, len(HAS_DELTA), features, device=device)
        flags = torch.zeros(count, MOST_ROWS, count, dtype=torch.int32, device=device)
        addresses, of_flags = (
            torch.tensor([part.data_ptr() for part in parts], device=device)
            for parts in (memory, flags)
        )
        terms = [
            SharedTerms(y, delta, addresses, MOST_ROWS * features, of_flags, index)
            for index, (y, delta) in enumerate(memory[:, :, :ROWS])
        ]
        if not meet:
            terms = [replace(each, flags=None) for each in terms]
        total = memory[:, 0, :ROWS].sum(0)
        if deltas:
            total += memory[:, 1, :ROWS].sum(0).nan_to_num()
        hidden = torch.randn(ROWS, features, device=device)
        return cls(terms, [hidden.clone() for _ in range(count)], total)


def pending(device: torch.device, terms: SharedTerms) -> PendingDelta:
    features = terms.y.shape[1]
    adapters = Adapters(torch.float32, device, 3)
    adapters.put(0, 64, (features,), (16,))
    adapters.put(1, 64, (features,), (0,))
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=device)
    return PendingDelta(adapters.table, SITE, slots, terms.delta)


@pytest.mark.parametrize("features", [96, 200])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize(("factor", "norm"), [(1.0, True), (0.22, True), (1.0, False)])
@pytest.mark.parametrize("deltas", [False, True])
def test_every_device_has_the_whole_sum(
    device: torch.device,
    features: int,
    count: int,
    post: bool,
    factor: float,
    norm: bool,
    deltas: bool,
) -> None:
    torch.manual_seed(features)
    devices = Devices.make(count, features, device, deltas=deltas, meet=False)
    weight, of_post = torch.randn(2, features, device=device)
    norms = ((weight, EPSILON) if norm else None, (of_post, 1e-3) if post else None)
    branch = devices.total
    if post:
        branch = functional.rms_norm(branch, (features,), of_post, 1e-3)
    kept = 2 * factor - 1
    total = kept * devices.hidden[0] + factor * branch
    normed = functional.rms_norm(total, (features,), weight, EPSILON) if norm else total
    results = []
    for terms, hidden in zip(devices.terms, devices.hidden, strict=True):
        delta = pending(device, terms) if deltas else None
        out = sum_norm(terms, delta, hidden, *norms, (factor, kept), programmatic_launch=False)
        torch.testing.assert_close(hidden, total, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(out, normed, atol=1e-5, rtol=1e-4)
        results.append((hidden, out))
    for hidden, out in results:
        assert torch.equal(hidden, results[0][0])
        assert torch.equal(out, results[0][1])


def test_terms_and_hidden_states_fit(device: torch.device) -> None:
    devices = Devices.make(2, 96, device, deltas=False, meet=False)
    hidden = torch.zeros(ROWS, 95, device=device)
    with pytest.raises(ValueError, match=r"hidden is torch.float32 \[6, 95\]"):
        sum_norm(devices.terms[0], None, hidden, None, programmatic_launch=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("early", [False, True])
def test_programs_of_a_row_meet(device: torch.device, early: bool) -> None:
    """In two streams, whichever comes first; and the flags are down after it."""
    devices = Devices.make(2, 512, device, deltas=False, meet=True)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    norm = (torch.ones(512, device=device), EPSILON)
    terms, total = list(zip(devices.terms, devices.hidden, strict=True)), devices.hidden[0].clone()
    torch.cuda.synchronize()
    for turn in range(50):
        order = terms if turn % 2 else terms[::-1]
        for stream, (each, hidden) in zip(streams, order, strict=True):
            with torch.cuda.stream(stream):
                sum_norm(each, None, hidden, norm, programmatic_launch=early)
        torch.cuda.synchronize()
        total += devices.total
        for hidden in devices.hidden:
            torch.testing.assert_close(hidden, total, atol=1e-3, rtol=1e-3)
