"""Files of picture processors that cut pictures into tiles: Idefics3's, SmolVLM's and InternVL's.
No torch."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from loraplex.adapters.violations import shown
from loraplex.server.protocol import AnyForm, TileRule

_LONGEST = "longest_edge"
# What Idefics3's processor makes no picture longer than.
_MOST_LONGEST = 4096
_MOST_TILES = 100
_IDEFICS3_EDGE = 364


class TileWords(NamedTuple):
    """Words that a processor writes for tiles. whole: its own file, which says more than of
    pictures. tokens: special ones by their names. encode: a text to ids, without tokens around it.
    """

    whole: Mapping[str, Any]
    tokens: Mapping[str, str | None]
    encode: Callable[[str], list[int]]

    def ids(self, name: str, usual: str) -> tuple[int, ...]:
        """Ids of a special token."""
        return tuple(self.encode(self.token(name, usual)))

    def token(self, name: str, usual: str) -> str:
        """A special token."""
        return self.tokens.get(name) or usual


def check_length(whole: Mapping[str, Any], key: str, form: AnyForm) -> None:
    """Check how many placeholders a processor's own file has for a tile, or for a picture of that
    size. Raises ValueError."""
    tokens = form.tokens((1, form.tile, form.tile))
    length = whole.get(key, tokens)
    if length != tokens:
        raise ValueError(f"{key} must be {tokens}, as the tower's, got {shown(length)}")


def read_idefics3(
    given: Mapping[str, Any], form: AnyForm, pixels: int, token_id: int, words: TileWords
) -> dict[str, Any]:
    """Fields of a VisionCard. pixels: a side of a tile. token_id: of the placeholder. Raises
    ValueError."""
    check_length(words.whole, "image_seq_len", form)
    longest = _edge(given, "size", 4 * _IDEFICS3_EDGE)
    size = _edge(given, "max_image_size", _IDEFICS3_EDGE)
    if size != pixels:
        raise ValueError(f"max_image_size must be {pixels}, as the tower's, got {size}")
    if longest > _MOST_LONGEST:
        raise ValueError(f"size must be at most {_MOST_LONGEST}, got {longest}")
    side = -(-longest // size) if given.get("do_image_splitting", True) else 1
    if side**2 > _MOST_TILES:
        raise ValueError(f"size: at most {_MOST_TILES} tiles are served, got {side**2}")
    around = words.token("fake_image_token", "<fake_token_around_image>")
    whole = around + words.token("global_image_token", "<global-img>")
    place = words.token("image_token", "<image>")
    numbers = range(1, side + 1)
    rows = ([f"{around}<row_{row}_col_{column}>" for column in numbers] for row in numbers)
    tiles = "\n".join("".join(f"{tile}{place}" for tile in row) for row in rows)
    ids = words.encode(f"{tiles}\n\n{whole}{place}")
    ends = [-1, *(number for number, each in enumerate(ids) if each == token_id)]
    *own, behind = [tuple(ids[begin + 1 : end]) for begin, end in pairwise(ends)] or [()]
    if len(own) != side**2:
        raise ValueError(f"the tokenizer has no token {place} of the id {token_id}")
    by_row = tuple(tuple(own[row * side : (row + 1) * side]) for row in range(side))
    return {
        "tiles": TileRule(size, 1, side**2, longest, by_row, behind),
        "before": tuple(words.encode(whole)),
        "after": tuple(words.encode(around)),
    }


def read_internvl(
    given: Mapping[str, Any], form: AnyForm, pixels: int, words: TileWords
) -> dict[str, Any]:
    """Fields of a VisionCard, as of `read_idefics3`. The model's processor has pictures cut,
    whatever `crop_to_patches` says."""
    check_length(words.whole, "image_seq_length", form)
    square = {"height": pixels, "width": pixels}
    if given.get("size") != square:
        raise ValueError(f"size must be {square}, as the tower's, got {shown(given.get('size'))}")
    least, most = given.get("min_patches", 1), given.get("max_patches", 12)
    if not all(type(n) is int and 0 < n <= _MOST_TILES for n in (least, most)):
        raise ValueError(f"min_patches and max_patches must be from 1 to {_MOST_TILES}")
    return {
        "tiles": TileRule(pixels, least, most),
        "before": words.ids("start_image_token", "<img>"),
        "after": words.ids("end_image_token", "</img>"),
    }


def _edge(given: Mapping[str, Any], name: str, usual: int) -> int:
    value = given.get(name, {_LONGEST: usual})
    edge = value.get(_LONGEST) if isinstance(value, Mapping) and len(value) == 1 else None
    if type(edge) is not int or edge < 1:
        raise ValueError(f"{name} must be {_LONGEST} alone, a positive number: {shown(value)}")
    return edge
