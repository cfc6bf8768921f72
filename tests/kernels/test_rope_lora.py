"""The rotation that expands LoRA on its way, against the reference and the plain rotation."""

import pytest
import torch

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.kernels.attention.rope_append import QkNorm, rope_append, rope_append_lora
from loraplex.server.kernels.launch.configs import load_configs
from loraplex.server.kernels.lora.pending import PendingLora
from loraplex.server.kernels.lora.segments import route
from loraplex.server.kernels.lora.shrink import shrink
from tests.grids import sparse
from tests.kernels.batches import SITE, Adapters, assert_close, make_batch
from tests.kernels.reference import lora_reference
from tests.kernels.rotations import TURNS

IN_FEATURES, PAGE, PAGES = 96, 16, 16
# Tiles that are full, in part and of few rows, rows without an adapter, and untouched sites.
SLOTS = [0] * 20 + [-1] * 18 + [1, 2, 4, -1, 3, 3, 3, 1] + [3] * 70 + [5]
RANKS = [(16, 32, 8), (3, 0, 16), (0, 40, 64), (100, 8, 11), (16, 0, 0)]


def made(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> tuple[Adapters, torch.Tensor, torch.Tensor]:
    """Adapters, and x and qkv of all tokens. shape: heads, kv heads, head_dim."""
    heads, kv_heads, head_dim = shape
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    adapters = Adapters(dtype, device, len(RANKS) + 1)
    for slot, ranks in enumerate(RANKS):
        adapters.put(slot, IN_FEATURES, widths, ranks)
    x, y = (torch.randn(len(SLOTS), n, device=device).to(dtype) for n in (IN_FEATURES, sum(widths)))
    return adapters, x, y


def shrunk(adapters: Adapters, x: torch.Tensor) -> PendingLora:
    batch = make_batch(len(x), adapters, "prefill")
    batch.slots.copy_(torch.tensor(SLOTS, dtype=torch.int32))
    configs = load_configs(x.device)
    route(batch.slots, batch.segments, adapters.table)
    config = configs.shrink("prefill", len(x))
    shrink(x, adapters.table, SITE, batch.segments, batch.workspace, config)
    return PendingLora(adapters.table, SITE, batch.segments, batch.workspace)


STEPS = [
    (0, False, torch.float32),
    (43, True, torch.float32),
    (40, False, torch.float16),
    (len(SLOTS), True, torch.float16),
]


@pytest.mark.parametrize(
    ("shape", "step", "turn"), sparse([(4, 2, 64), (5, 1, 80)], STEPS, list(TURNS))
)
def test_rotation_of_a_product(
    device: torch.device,
    shape: tuple[int, int, int],
    step: tuple[int, bool, torch.dtype],
    turn: str,
) -> None:
    """Decodes get the sum in place and nothing else; of prompts the product is not written. k and
    v of tokens without a place go nowhere. step: decodes, whether there is a norm, and the type."""
    num_decodes, norm, dtype = step
    torch.manual_seed(num_decodes)
    heads, kv_heads, head_dim = shape
    adapters, x, y = made(device, dtype, shape)
    tokens = len(SLOTS)
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    total = lora_reference(y, x, SLOTS, adapters.weights, widths).to(device, dtype)
    rotation = TURNS[turn].rotation(head_dim, 50, device)
    positions = torch.randint(0, 50, (tokens,), device=device)
    slots = torch.randperm(PAGES * PAGE, device=device)[:tokens]
    slots[7::9] = -1
    weights = torch.randn(heads + kv_heads, head_dim, device=device).to(dtype)
    of_norm = QkNorm(weights, 1e-5) if norm else None
    caches = torch.empty(4, PAGES, PAGE, kv_heads, head_dim, device=device, dtype=dtype)
    caches.fill_(float("nan"))  # what is not written
    prompts = slice(num_decodes, tokens)
    places = (rotation, positions[prompts], slots[prompts])
    expected = rope_append(total[prompts], *places, CachePages(caches[0], caches[1]), of_norm)

    qkv = y.clone()
    context = (rotation, positions, slots, CachePages(caches[2], caches[3]), of_norm)
    pending, config = shrunk(adapters, x), load_configs(device).rope(len(x))
    q = rope_append_lora(qkv, pending, num_decodes, *context, config)

    assert q.shape == (tokens - num_decodes, heads, head_dim)
    if len(q):
        placed = slots[prompts] >= 0
        assert_close(q[placed], expected[placed], dtype)
        for found, wanted in zip(caches[2:], caches[:2], strict=True):
            written = slots[prompts][placed]
            found, wanted = found.flatten(0, 1), wanted.flatten(0, 1)
            assert_close(found[written], wanted[written], dtype)
            assert torch.equal(found.isnan(), wanted.isnan())
    else:
        assert bool(caches.isnan().all())
    if num_decodes:
        assert_close(qkv[:num_decodes], total[:num_decodes], dtype)
    assert torch.equal(qkv[num_decodes:], y[num_decodes:])


def test_a_norm_over_all_heads_is_refused() -> None:
    device, shape = torch.device("cpu"), (2, 1, 16)
    adapters, x, y = made(device, torch.float32, shape)
    norm = QkNorm(torch.ones(3, 16), 1e-5, all_heads=True)
    places, pages = torch.zeros(2, len(x), dtype=torch.int64), torch.zeros(2, 1, PAGE, 1, 16)
    cache = CachePages(pages[0], pages[1])
    rotation = TURNS["halves"].rotation(16, 50, device)
    context = (rotation, *places, cache, norm, load_configs(device).rope(len(x)))
    with pytest.raises(ValueError, match="a norm over all heads"):
        rope_append_lora(y, shrunk(adapters, x), 0, *context)
