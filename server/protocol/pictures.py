"""Pictures of a prompt: where they lie in its tokens, how many tokens they take, and how they are
cut into tiles of one size. Pure."""

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from loraplex.server.protocol import picture_cuts
from loraplex.server.protocol.picture_cuts import PictureCut

Grid = tuple[int, int, int]
# The fewest and the most pixels of a resized picture that a request asks for; 0 = it says nothing.
PixelBounds = tuple[int, int]
UNBOUNDED: PixelBounds = (0, 0)
# The processor by whose rule a picture is resized and cut into patches.
PatchRule = Literal["qwen2_vl", "clip", "pixtral", "llava_next", "gemma4", "stretched"]
# A picture that is so many times longer than wide, or wider than long, is refused.
_MAX_ASPECT = 200


class TileRule(msgspec.Struct, frozen=True):
    """Tiles of a picture, row by row; behind several comes all of the picture as one more.

    size: pixels a side of a tile. least, most: how many there are, but for that one. longest_edge:
    pixels that the longer side gets first, after which the picture is stretched to whole tiles, and
    all of it made of those; 0 = it is stretched to the tiles nearest to its shape. ids: before the
    placeholders of each tile by row and column; () = there are none. whole_ids: before those of the
    one more.
    """

    size: int
    least: int = 1
    most: int = 1
    longest_edge: int = 0
    ids: tuple[tuple[tuple[int, ...], ...], ...] = ()
    whole_ids: tuple[int, ...] = ()

    def shape(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles of a picture of so many pixels."""
        if self.most == 1:
            return 1, 1
        if not self.longest_edge:
            return picture_cuts.nearest_tiles(width, height, self.size, self.least, self.most)
        first = picture_cuts.with_longest(width, height, self.longest_edge)
        return picture_cuts.in_tiles(*first, self.size)

    def cuts(self, width: int, height: int, seen: int) -> list[PictureCut]:
        """The cuts of a picture of so many pixels, all of it last. seen: pixels a side of a tile
        that make patches."""
        rows, columns = self.shape(width, height)
        own = picture_cuts.tiles(rows, columns, self.size, seen)
        goes_on = bool(self.longest_edge)
        found = [PictureCut((columns * self.size, rows * self.size), own, goes_on)]
        if len(own) > 1:
            found.append(PictureCut((self.size, self.size), ((0, 0, seen, seen),), goes_on))
        if not goes_on:
            return found
        first = picture_cuts.with_longest(width, height, self.longest_edge)
        return [PictureCut(first, ()), *found]

    def ids_before(self, rows: int, columns: int) -> Iterator[tuple[int, ...]]:
        """Ids before the placeholders of each of several tiles, and of all of the picture."""
        for row in self.ids[:rows]:
            yield from row[:columns]
        yield self.whole_ids


class PictureSpan(msgspec.Struct, frozen=True, array_like=True):
    """A picture's placeholders in a prompt, from the first to the last: prompt_ids[start : start +
    length]. Tokens of text may lie between them.

    picture: SHA-256 of the file's bytes, in hex. grid: (time, height, width) in patches, before a
    square of them becomes one token. pixels: as the request bounds them.
    """

    start: int
    length: int
    picture: str
    grid: Grid
    pixels: PixelBounds = UNBOUNDED


class PictureForm(msgspec.Struct, frozen=True, tag="plain"):
    """How patches of a picture become placeholders. side: a square of `side * side` patches is
    one. added: placeholders of a picture beside those of its patches. tile: patches a side of every
    picture; 0 = there may be any number."""

    side: int = 1
    added: int = 0
    tile: int = 0

    def fits(self, grid: Grid) -> bool:
        """Whether a picture may have this grid."""
        time, height, width = grid
        if self.tile:
            return grid == (1, self.tile, self.tile)
        whole = min(height, width) > 0 and not (height % self.side or width % self.side)
        return time == 1 and whole

    def tokens(self, grid: Grid) -> int:
        """Placeholders of a picture; each has a result of the tower."""
        return math.prod(grid) // self.side**2 + self.added

    def merged(self, grid: Grid) -> int:
        """Vectors that the tower makes of a picture's patches, before they lie as placeholders."""
        return self.tokens(grid)

    def stack(self, grid: Grid) -> tuple[int, int]:
        """Height and width, in patches, of what the tower reads of a picture: all of its tiles, one
        below the other."""
        return grid[1:]

    def patches(self, grid: Grid) -> int:
        """Patches that the tower reads of a picture."""
        return math.prod(self.stack(grid))

    def largest(self, tokens: int) -> Grid:
        """The grid of a picture of most patches, of so many placeholders where it may be of any
        size."""
        side = self.tile or math.isqrt(tokens) * self.side
        return 1, side, side


class TiledForm(PictureForm, frozen=True, kw_only=True, tag="tiled"):
    """Pictures that are padded to tiles, whose placeholders lie line by line. Before them come
    those of all of the picture, as one tile; behind each line comes one more.

    tilings: numbers of tiles by height and width that a picture may have. The first number of a
    grid says which, from 1; the others are patches that have a part of the picture.
    """

    tilings: tuple[tuple[int, int], ...]

    def padded(self, number: int) -> tuple[int, int]:
        """Height and width, in patches, of a picture's tiles but for the first. number: the first
        of its grid."""
        high, wide = self.tilings[number - 1]
        return high * self.tile, wide * self.tile

    def fits(self, grid: Grid) -> bool:
        if not 0 < grid[0] <= len(self.tilings):
            return False
        # One side is full, and of the other as much is padding on both sides.
        added = [most - own for most, own in zip(self.padded(grid[0]), grid[1:], strict=True)]
        return min(grid[1:]) >= 0 == min(added) == max(added) % 2

    def tokens(self, grid: Grid) -> int:
        return self.tile**2 + grid[1] * (grid[2] + 1)

    def merged(self, grid: Grid) -> int:
        return self.patches(grid)

    def stack(self, grid: Grid) -> tuple[int, int]:
        return (1 + math.prod(self.tilings[grid[0] - 1])) * self.tile, self.tile

    def largest(self, tokens: int) -> Grid:
        numbers = range(1, 1 + len(self.tilings))
        grids = [(number, *self.padded(number)) for number in numbers]
        return max(grids, key=self.patches)


class StretchedForm(PictureForm, frozen=True, tag="stretched"):
    """Pictures that are stretched to tiles, which a grid counts. Behind several tiles comes all of
    the picture as one more. added: of each tile."""

    def fits(self, grid: Grid) -> bool:
        is_whole = min(grid) > 0 and not (grid[1] % self.tile or grid[2] % self.tile)
        return grid[0] == 1 and is_whole

    def shape(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of tiles, but for the one of all of the picture."""
        return grid[1] // self.tile, grid[2] // self.tile

    def tiles(self, grid: Grid) -> int:
        """Tiles, all of the picture included."""
        count = math.prod(self.shape(grid))
        return count + 1 if count > 1 else 1

    def tokens(self, grid: Grid) -> int:
        return self.tiles(grid) * (self.tile**2 // self.side**2 + self.added)

    def stack(self, grid: Grid) -> tuple[int, int]:
        return self.tiles(grid) * self.tile, self.tile

    def largest(self, tokens: int) -> Grid:
        tiles = tokens // self.tokens((1, self.tile, self.tile)) - 1
        return 1, self.tile, self.tile * max(tiles, 1)


AnyForm = PictureForm | TiledForm | StretchedForm


class VisionCard(msgspec.Struct, frozen=True):
    """The way from a picture to a model's patches and tokens.

    patch_size: of a square patch, in pixels. temporal_patch_size: frames of one patch; a picture
    is repeated for them. form: of its placeholders.
    min_pixels, max_pixels: of the resized picture. mean, std: of red, green and blue, from 0 to 1.
    token_id: the placeholder of a token of a picture. spot_id: the token of a prompt that becomes a
    picture; None = the placeholder. opens_id, closes_id: the tokens that a prompt has around it;
    None = there is none. before, after: ids that come around a picture's placeholders. around: text
    that comes on both sides of each spot, before the prompt is encoded. resample: Pillow's number
    of the filter that resizes. By the rule `clip` the shorter side gets `shortest_edge` pixels (0 =
    each gets `crop_size`), and the model sees the middle square of `crop_size` pixels a side; by
    others both are 0. By the rule `pixtral` neither side has more than `longest_edge` pixels.
    row_ends: the ids behind each row of placeholders, and behind the last one; None = there are
    none. By the rule `gemma4` a resized picture has as many pixels as there may be. colours_last:
    the colours of a pixel stand together in a patch; else the pixels of a colour do. tiles: of a
    StretchedForm.
    """

    rule: PatchRule
    patch_size: int
    temporal_patch_size: int
    form: AnyForm
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    token_id: int
    spot_id: int | None = None
    opens_id: int | None = None
    closes_id: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    around: str = ""
    resample: int = 3
    min_pixels: int = 0
    max_pixels: int = 0
    shortest_edge: int = 0
    crop_size: int = 0
    longest_edge: int = 0
    row_ends: tuple[int, int] | None = None
    colours_last: bool = False
    tiles: TileRule | None = None

    @property
    def columns(self) -> int:
        """Numbers of one patch: three colours of all of its pixels and frames."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def spot(self) -> int:
        """The token of a prompt that becomes a picture."""
        return self.token_id if self.spot_id is None else self.spot_id

    @property
    def place(self) -> tuple[int, ...]:
        """Ids of a picture in a prompt, before it has its placeholders."""
        ids = (self.opens_id, self.spot, self.closes_id)
        return tuple(token_id for token_id in ids if token_id is not None)

    @property
    def unit(self) -> int:
        """Pixels a side of one placeholder."""
        return self.patch_size * self.form.side

    @property
    def most_seen_pixels(self) -> int:
        """A bound of the pixels that patches are made of."""
        return _RULES[self.rule].most_seen(self)

    @property
    def most_tokens(self) -> int:
        """A bound of a picture's placeholders; 0 = its form has one."""
        if isinstance(self.form, TiledForm):
            return 0
        return self.most_seen_pixels // self.unit**2 + self.form.added

    def bounded(self, pixels: PixelBounds) -> "VisionCard":
        """The card for a picture whose pixels a request bounds, but to no more than there may be.
        ValueError: the processor does not know such bounds, or there are fewer pixels."""
        if pixels == UNBOUNDED:
            return self
        if self.rule != "qwen2_vl":
            raise ValueError("the model's processor knows no min_pixels and max_pixels")
        if not 0 <= min(pixels) <= max(pixels) <= self.max_pixels:
            limit = f"{self.max_pixels} at most, as the model's own files say"
            raise ValueError(f"min_pixels and max_pixels can be {limit}")
        least, most = pixels[0] or self.min_pixels, pixels[1] or self.max_pixels
        return msgspec.structs.replace(self, min_pixels=least, max_pixels=most)

    def cuts(self, width: int, height: int) -> list[PictureCut]:
        """The pixels that patches are made of. Boxes are of one size, and lie one below the other
        as `PictureForm.stack` has them. ValueError: the picture is too long and thin."""
        _check_shape(width, height)
        return _RULES[self.rule].cuts(self, width, height)

    def grid(self, width: int, height: int) -> Grid:
        """Patches of a picture of so many pixels. ValueError: it is too long and thin."""
        _check_shape(width, height)
        return _RULES[self.rule].grid(self, width, height)

    def ids(self, grid: Grid) -> list[int]:
        """Ids that come in place of the spot of a picture of this grid."""
        own = [self.token_id] * self.form.tokens(grid)
        if self.row_ends is not None:
            behind, end = self.row_ends
            high, wide = (patches // self.form.side for patches in grid[1:])
            own = [*[*[self.token_id] * wide, behind] * high][:-1] + [end]
        if isinstance(self.form, StretchedForm) and self.tiles is not None and self.tiles.ids:
            tiles = self.form.tiles(grid)
            before = self.tiles.ids_before(*self.form.shape(grid)) if tiles > 1 else [self.before]
            of_tile = own[: len(own) // tiles]
            return [*chain.from_iterable([*ids, *of_tile] for ids in before), *self.after]
        return [*self.before, *own, *self.after]

    def within(self, ids: list[int]) -> slice:
        """The part of a picture's ids that its span has: from the first placeholder to the last."""
        behind = ids[::-1].index(self.token_id)
        return slice(ids.index(self.token_id), len(ids) - behind)


def _check_shape(width: int, height: int) -> None:
    """Raise ValueError for a picture that is too long and thin."""
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ValueError(
            f"a picture of {width} x {height} pixels is more than {_MAX_ASPECT} times longer "
            "one way than the other"
        )


def _grid_of_cut(card: VisionCard, width: int, height: int) -> Grid:
    """The grid of a picture whose patches are made of one cut."""
    ((left, top, right, bottom),) = card.cuts(width, height)[0].boxes
    return 1, (bottom - top) // card.patch_size, (right - left) // card.patch_size


class _Rule(NamedTuple):
    """A rule's part of a VisionCard: what its properties and methods of these names give."""

    most_seen: Callable[[VisionCard], int]
    cuts: Callable[[VisionCard, int, int], list[PictureCut]]
    grid: Callable[[VisionCard, int, int], Grid] = _grid_of_cut


def _area_pixels(card: VisionCard) -> int:
    return 2 * max(card.min_pixels, card.max_pixels) + 2 * _MAX_ASPECT * card.unit**2


def _area_cuts(card: VisionCard, width: int, height: int) -> list[PictureCut]:
    bounds = card.min_pixels, card.max_pixels
    return [picture_cuts.whole(picture_cuts.with_area(width, height, card.unit, *bounds))]


def _middle_cuts(card: VisionCard, width: int, height: int) -> list[PictureCut]:
    side = card.crop_size
    size = (side, side)
    if card.shortest_edge:
        size = picture_cuts.with_shortest(width, height, card.shortest_edge)
    return [picture_cuts.middle(size, side, side // card.patch_size * card.patch_size)]


def _longest_pixels(card: VisionCard) -> int:
    # Sides are multiples of whole tokens.
    return (card.longest_edge + card.unit) ** 2


def _longest_cuts(card: VisionCard, width: int, height: int) -> list[PictureCut]:
    size = picture_cuts.within(width, height, card.unit, card.longest_edge)
    return [picture_cuts.whole(size)]


def _filling_cuts(card: VisionCard, width: int, height: int) -> list[PictureCut]:
    return [picture_cuts.whole(picture_cuts.filling(width, height, card.unit, card.max_pixels))]


def _padded_form(card: VisionCard) -> TiledForm:
    assert isinstance(card.form, TiledForm)
    return card.form


def _padded_pixels(card: VisionCard) -> int:
    form = _padded_form(card)
    return form.patches(form.largest(0)) * card.patch_size**2


def _padded_cuts(card: VisionCard, width: int, height: int) -> list[PictureCut]:
    side, tilings = card.crop_size, _padded_form(card).tilings
    seen = side // card.patch_size * card.patch_size
    _, tiling = picture_cuts.best_tiling(width, height, side, tilings)
    tiles = picture_cuts.in_tiling(width, height, side, tiling, seen)
    return [PictureCut((side, side), ((0, 0, seen, seen),)), tiles]


def _padded_grid(card: VisionCard, width: int, height: int) -> Grid:
    form = _padded_form(card)
    number = picture_cuts.best_tiling(width, height, card.crop_size, form.tilings)[0] + 1
    return number, *picture_cuts.without_padding(width, height, *form.padded(number))


def _tile_rule(card: VisionCard) -> TileRule:
    assert card.tiles is not None
    return card.tiles


def _stretched_pixels(card: VisionCard) -> int:
    tiles = _tile_rule(card)
    return (tiles.most + 1) * tiles.size**2


def _stretched_cuts(card: VisionCard, width: int, height: int) -> list[PictureCut]:
    return _tile_rule(card).cuts(width, height, card.patch_size * card.form.tile)


def _stretched_grid(card: VisionCard, width: int, height: int) -> Grid:
    rows, columns = _tile_rule(card).shape(width, height)
    return 1, rows * card.form.tile, columns * card.form.tile


_RULES: dict[PatchRule, _Rule] = {
    "qwen2_vl": _Rule(_area_pixels, _area_cuts),
    "clip": _Rule(lambda card: card.crop_size**2, _middle_cuts),
    "pixtral": _Rule(_longest_pixels, _longest_cuts),
    "gemma4": _Rule(lambda card: card.max_pixels, _filling_cuts),
    "llava_next": _Rule(_padded_pixels, _padded_cuts, _padded_grid),
    "stretched": _Rule(_stretched_pixels, _stretched_cuts, _stretched_grid),
}
