"""The choice of prompts whose latents are unfolded to keys and values, and the pieces of these.

Either `kv_b` makes keys and values of latents first, or it is absorbed in queries and results. An
unfolded head is narrower than a latent, so each pair of a query and a key takes fewer operations.
But each key of the context must be unfolded. Which is less depends on the queries for a key.
"""

from dataclasses import dataclass

import numpy as np

from loraplex.server.kernels.attention.prompt_attention import cut_prompts
from loraplex.server.model.spec.latent_spec import LatentSpec

# Operations that a GPU does while it moves a byte.
_OPERATIONS_A_BYTE = 200
_ITEM = 2  # bytes of a number on a GPU
# Operations of a layer that take a GPU as long as the host needs to launch a layer.
_LAUNCHED = 40e9


def saved_by_unfolding(spec: LatentSpec, starts: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """Count operations of a layer that unfolding saves of each prompt, float64 `[prompts]`; less
    than 0 where it costs more. starts, num_new: int64 `[prompts]`: a prompt computes tokens `start
    .. start + num_new`.
    """
    heads, of_kv_b = spec.num_heads, spec.nope + spec.value_dim
    pairs = num_new * starts + num_new * (num_new + 1) / 2
    product = 2 * heads * spec.latent * of_kv_b
    # Each number is written and read.
    absorbed = product + 2 * _moved(heads * (spec.head_dim + spec.latent))
    unfolded = product + _moved(spec.head_dim + 2 * heads * of_kv_b)
    narrower = 2 * heads * (2 * spec.latent - of_kv_b)
    saved: np.ndarray = pairs * narrower + num_new * absorbed - (starts + num_new) * unfolded
    return saved


def _moved(numbers: int) -> int:
    """Operations that moving so many numbers takes the time of."""
    return numbers * _ITEM * _OPERATIONS_A_BYTE


def are_unfolded(spec: LatentSpec, starts: np.ndarray, num_new: np.ndarray) -> np.ndarray:
    """Say of which prompts keys and values are unfolded, bool `[prompts]`."""
    return saved_by_unfolding(spec, starts, num_new) > 0


def leaves_graphs(spec: LatentSpec, starts: np.ndarray, num_new: np.ndarray) -> bool:
    """Say whether a step is faster outside graphs, which absorb `kv_b`: it is where unfolding saves
    at least the time in which the host launches."""
    saved = saved_by_unfolding(spec, starts, num_new)
    return bool(saved[saved > 0].sum() >= _LAUNCHED)


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """Keys that are unfolded together. prompts, positions: int64 `[keys]`, of each key. tiles:
    int32 `[tiles, 6]`, queries that see some of the keys: first token in the flat batch, its
    position and how many there are; positions of the first key of their prompt that is there, and
    of the end; and the place of that first key."""

    prompts: np.ndarray
    positions: np.ndarray
    tiles: np.ndarray


def cut_pieces(
    starts: np.ndarray, num_new: np.ndarray, chosen: np.ndarray, tokens: int, room: int
) -> list[KeyPiece]:
    """Cut the contexts of the chosen prompts into pieces of at most `room` keys, in their order.
    chosen: bool `[prompts]`; tokens: of a tile of queries. The rest as of `saved_by_unfolding`."""
    numbers = np.arange(len(starts))
    queries = cut_prompts(numbers, starts, num_new, tokens, chosen)
    contexts = np.where(chosen, starts + num_new, 0)
    ends = np.cumsum(contexts)
    pieces = []
    for first in range(0, int(contexts.sum()), room):
        begins = np.clip(first - (ends - contexts), 0, contexts)
        stops = np.clip(first + room - (ends - contexts), 0, contexts)
        counts = stops - begins
        places = np.cumsum(counts) - counts
        of = np.repeat(numbers, counts)
        positions = np.arange(len(of)) - places[of] + begins[of]
        prompt, token, position, count = queries.T
        end = np.minimum(stops[prompt], position + count)
        context = (begins[prompt], end, places[prompt])
        tiles = np.stack((token, position, count, *context), axis=1)[end > begins[prompt]]
        most_first = np.argsort(tiles[:, 3] - tiles[:, 4], kind="stable")
        pieces.append(KeyPiece(of, positions, tiles[most_first].astype(np.int32)))
    return pieces
