"""Tokens that certify their origin: each is a function of all tokens before it, and of the adapter
that acts on each of them. Pure."""

import struct
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

from loraplex.server.protocol import PictureSpan, VectorParams

Mark = bytes
# Numbers of a vector of hidden states.
CERTIFIED_SIZE = 16


class CertifyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an engine without a model.

    eos_percent: how often a token is the first end-of-sequence id (0 = never), to two places.

    step_s: seconds that the device takes for a step. copy_polls: calls of `poll_copies` until a
    copy is usable. ending_polls: calls from then on until the copy is over (0 = at once).
    check_bytes: slabs are read when a copy starts, is usable and is over. Their bytes must be the
    same as before. deadly_id: a step that begins a prompt with it ends the process (-1 = none).
    """

    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = (2,)
    eos_percent: float = 0
    step_s: float = 0.0
    copy_polls: int = 1
    ending_polls: int = 0
    check_bytes: bool = False
    deadly_id: int = -1


ROOT_MARK: Mark = bytes(16)
WRONG_MARK: Mark = b"a wrong draft..."


@lru_cache(maxsize=4096)
def _origin(adapter: str | None) -> bytes:
    return b"base" if adapter is None else b"lora" + adapter.encode()


def next_mark(mark: Mark, token_id: int, adapter: str | None) -> Mark:
    """Mark after one more token. adapter: digest of the adapter that acts on it, or None."""
    said = mark + token_id.to_bytes(8, "little") + _origin(adapter)
    return blake2b(said, digest_size=16).digest()


def pictured_id(picture: str, grid: Sequence[int], index: int) -> int:
    """The id that a placeholder counts as, in marks: no other token of any picture has it."""
    said = f"{picture} {tuple(grid)} {index}".encode()
    return int.from_bytes(blake2b(said, digest_size=7).digest(), "little")


def seen_by(picture: str, adapter: str) -> str:
    """The name of a picture's results where an adapter changes the tower; "" = none does."""
    return f"{picture} seen by {adapter}" if adapter else picture


def pictured_ids(
    prompt_ids: Sequence[int], pictures: Sequence[PictureSpan], adapter: str = ""
) -> list[int]:
    """A prompt's ids as marks count them. adapter: as of `seen_by`."""
    found = list(prompt_ids)
    for span in pictures:
        for index in range(span.length):
            picture = seen_by(span.picture, adapter)
            found[span.start + index] = pictured_id(picture, span.grid, index)
    return found


def certified_token(mark: Mark, options: CertifyOptions, may_stop: bool = True) -> int:
    number = int.from_bytes(mark, "little")
    if may_stop and options.eos_token_ids and number % 10_000 < 100 * options.eos_percent:
        return options.eos_token_ids[0]
    token_id = (number >> 8) % options.vocab_size
    while token_id in options.eos_token_ids:
        token_id = (token_id + 1) % options.vocab_size
    return token_id


def certified_vector(marks: Sequence[Mark], vector: VectorParams, num_classes: int) -> bytes:
    """Vector of a prompt with these marks: numbers that no other prompt, adapter or wish has."""
    seen = b"".join(marks) if vector.pooling == "mean" else marks[-1]
    if vector.kind == "logits":
        parts = [seen + token_id.to_bytes(8, "little") for token_id in vector.token_ids]
    else:
        count = num_classes if vector.kind == "scores" else CERTIFIED_SIZE
        parts = [seen + bytes((i % 256,)) for i in range(count)]
    numbers = (blake2b(part, digest_size=2).digest() for part in parts)
    return struct.pack(f"<{len(parts)}f", *(int.from_bytes(n, "little") / 65536 for n in numbers))


def certified_output(
    adapter: str | None,
    prompt_ids: Sequence[int],
    count: int,
    options: CertifyOptions,
    min_tokens: int = 0,
    adapter_from: int | None = 0,
    allowed: Sequence[int] = (),
) -> list[int]:
    """The right output for a prompt: at most `count` tokens, ending after an end-of-sequence id.

    adapter: digest, or None for the base. adapter_from: as in GenerateRequest. allowed: ids that
    alone may be drawn, beside ends; () = all.
    """
    drawn = sorted({*allowed, *options.eos_token_ids}) if allowed else []
    mark, adapter = ROOT_MARK, None if adapter_from is None else adapter
    for position, token_id in enumerate(prompt_ids):
        mark = next_mark(mark, token_id, adapter if position >= (adapter_from or 0) else None)
    output: list[int] = []
    while len(output) < count and not (output and output[-1] in options.eos_token_ids):
        token_id = certified_token(mark, options, len(output) >= min_tokens)
        if drawn:
            token_id = drawn[bisect_left(drawn, token_id) % len(drawn)]
        output.append(token_id)
        mark = next_mark(mark, output[-1], adapter)
    return output
