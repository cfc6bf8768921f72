"""Pictures of an executor without a model: results are known by what they are of."""

from collections import deque

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.engine.plan import PlacedPicture
from tests.certifying.certificates import pictured_id


class Encoded:
    """A chunk of a tower is over at once."""

    def ready(self) -> bool:
        return True


class FakePictures:
    """Blocks of results, and pictures on their way. bad: those that cannot be brought."""

    def __init__(self, limits: PictureLimits | None, polls: int) -> None:
        self._limits, self._polls = limits, polls
        self._results: dict[int, tuple[str, tuple[int, int, int], int]] = {}
        self._coming: deque[tuple[int, PictureCopy]] = deque()
        self._here: deque[PictureCopy] = deque()
        self._layers = 0
        self.bad: set[str] = set()

    def start(self, copy: PictureCopy) -> None:
        assert self._limits is not None
        assert len(copy.blocks) == self._limits.blocks(self._limits.form.tokens(copy.grid))
        assert len(self._coming) + len(self._here) < 2
        self._coming.append((self._polls, copy))

    def poll(self) -> list[PictureIn]:
        self._coming = deque((polls - 1, copy) for polls, copy in self._coming)
        news = []
        while self._coming and self._coming[0][0] <= 0:
            _, copy = self._coming.popleft()
            error = "it is bad" if copy.picture in self.bad else None
            if error is None:
                self._here.append(copy)
            news.append(PictureIn(copy.picture, error))
        return news

    def encode(self, layers: int) -> Encoded:
        assert self._limits is not None
        copy = self._here[0]
        self._layers += layers
        assert layers > 0
        assert self._layers <= self._limits.layers
        if self._layers == self._limits.layers:
            for number, block in enumerate(copy.blocks):
                self._results[block] = (copy.picture, copy.grid, number)
            self._here.popleft()
            self._layers = 0
        return Encoded()

    def forget(self) -> None:
        self._coming.clear()
        self._here.clear()
        self._layers = 0

    def ids(self, placed: PlacedPicture) -> list[int]:
        """The ids that the placeholders of a picture count as, by what its blocks hold now."""
        assert self._limits is not None
        size, found = self._limits.block_tokens, list[int]()
        for number, block in enumerate(placed.blocks):
            picture, grid, of = self._results.get(block, ("nothing", (0, 0, 0), -1))
            assert (grid, of) == (placed.grid, number), "a block of another picture"
            found += [pictured_id(picture, grid, number * size + i) for i in range(size)]
        return found[: self._limits.form.tokens(placed.grid)]
