"""Large tensors go to a device through two buffers, and are what torch alone would make of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loraplex.adapters.base import WHOLE, Shard
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.linear.linear import Linear
from loraplex.server.model.linear.quantised import RoundedLinear
from loraplex.server.model.pages import pinned_copies
from loraplex.server.model.pages.pinned_copies import PinnedCopies
from loraplex.server.model.weights import load_weights
from tests.server.model.hub_models import make_model
from tests.server.model.quantised.checkpoints import save_quantised
from tests.server.model.quantised.formats import FORMATS

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
BUFFER = 300_000
Made = Callable[[torch.Tensor], torch.Tensor]
Copy = Callable[[torch.Tensor, torch.device], torch.Tensor]


def into(dtype: torch.dtype = torch.float32) -> Copy:
    return lambda x, device: torch.zeros(x.shape, dtype=dtype, device=device).copy_(x)


def into_columns(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    wide = torch.zeros(len(source), source.shape[1] + 9, device=device)
    wide[:, 5:-4].copy_(source)
    return wide


def moved(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    return source.to(device)


COPIES: dict[str, tuple[Made, Copy]] = {
    "rows": (lambda x: x, into()),
    "another dtype": (lambda x: x, into(torch.bfloat16)),
    "transposed": (lambda x: x.T, into()),
    "some columns": (lambda x: x[:, 3:401], into_columns),
    "every second row": (lambda x: x.view(-1, 100)[::2], into()),
    "rows larger than a buffer": (lambda x: x.view(3, 250, 700), into()),
    "one row": (lambda x: x.view(1, -1), into()),
    "a vector": (torch.flatten, into()),
    "moved": (lambda x: x, moved),
    "moved in FP8": (lambda x: x.to(torch.float8_e4m3fn).repeat(4, 1), moved),
    "moved, transposed": (lambda x: x.T, moved),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COPIES)
def test_bits_are_those_of_torch(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, copy = COPIES[name]
    where = torch.device(device)
    source = made(torch.randn(750, 700, generator=torch.Generator().manual_seed(1)))
    pieces, through = list[int](), PinnedCopies(where, BUFFER)
    plain, staged = copy(source, where), through._bring_piece

    def bring_piece(piece: torch.Tensor, place: torch.Tensor) -> None:
        pieces.append(place.nbytes)
        staged(piece, place)

    monkeypatch.setattr(through, "_bring_piece", bring_piece)
    with torch.inference_mode(), through:
        found = copy(source, where)
    assert (found.dtype, found.stride()) == (plain.dtype, plain.stride())
    assert torch.equal(found.contiguous().view(torch.uint8), plain.contiguous().view(torch.uint8))
    assert len(pieces) > 2
    assert max(pieces) <= BUFFER


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.zeros(9).copy_(torch.ones(9)),
        lambda: torch.zeros(700, 900).copy_(torch.ones(900)),
        lambda: torch.ones(700, 900).to(torch.bfloat16),
        lambda: torch.zeros(700, 900).copy_(torch.ones(700, 900), non_blocking=True),
    ],
)
def test_other_copies_are_left_to_torch(copy: Callable[[], torch.Tensor]) -> None:
    through = PinnedCopies(CPU, 0)  # which no piece would fit
    with through:
        found = copy()
    assert bool((found == 1).all())


def numbers(linear: Linear) -> list[torch.Tensor]:
    weight = (linear.base if isinstance(linear, RoundedLinear) else linear).weight
    if isinstance(weight, torch.Tensor):
        return [weight]
    return [weight.numbers, *(x for x in weight.tensors if isinstance(x, torch.Tensor))]


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["fp8-channel", "awq"])
def test_weights_are_those_of_torch(
    form: str, packed: bool, shard: Shard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised matrices, others, and a device's part of them are equal."""
    save_quantised(make_model("llama3", intermediate_size=128), tmp_path, FORMATS[form])
    model = read_config(tmp_path)

    def read() -> list[Linear]:
        weights = load_weights(tmp_path, model, torch.bfloat16, CPU, packed=packed, shard=shard)
        return [linear for layer in weights.layers for linear in layer.linears]

    plain, through = read(), PinnedCopies(CPU, 4096)
    monkeypatch.setattr(pinned_copies, "_LEAST_BYTES", 256)
    with through:
        found = read()
    for one, other in zip(plain, found, strict=True):
        assert type(one) is type(other)
        for a, b in zip(numbers(one), numbers(other), strict=True):
            assert torch.equal(a.float(), b.float())
