"""Pictures of an executor without a model: results are known by what they are of."""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

from loraplex.server.engine.executor import PictureCopy, PictureIn, PictureLimits
from loraplex.server.engine.plan import PlacedPicture
from tests.certifying.certificates import pictured_id, seen_by

# Chunks that pictures take to pass the tower.
CHUNKS = 5
SECONDS = 0.25  # that each takes


class Encoded:
    """A chunk of a tower is over at once."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last

    def ready(self) -> bool:
        return True

    def seconds(self) -> float:
        return SECONDS


class FakePictures:
    """Blocks of results, and pictures on their way. memory: where patches lie, which must be the
    same for one picture each time; None = nobody looks. bad: those that cannot be brought.
    """

    def __init__(
        self, limits: PictureLimits | None, polls: int, memory: memoryview | None = None
    ) -> None:
        self._limits, self._polls, self._memory = limits, polls, memory
        self._patches: dict[tuple[str, tuple[int, int, int]], bytes] = {}
        self._results: dict[int, tuple[str, tuple[int, int, int], int]] = {}
        self._coming: deque[tuple[int, PictureCopy]] = deque()
        self._here: deque[PictureCopy] = deque()
        self._passing: list[tuple[PictureCopy, str]] = []
        self._chunks = 0
        self.most_passing = 0  # that ever passed the tower together
        self.bad: set[str] = set()

    def start(self, copy: PictureCopy) -> None:
        assert self._limits is not None
        assert len(copy.blocks) == self._limits.blocks(self._limits.form.tokens(copy.grid))
        assert len(self._coming) + len(self._here) + len(self._passing) < 8
        self._coming.append((self._polls, copy))

    def poll(self) -> list[PictureIn]:
        self._coming = deque((polls - 1, copy) for polls, copy in self._coming)
        news = []
        while self._coming and self._coming[0][0] <= 0:
            _, copy = self._coming.popleft()
            error = "it is bad" if copy.picture in self.bad else self._other_patches(copy)
            if error is None:
                self._here.append(copy)
            news.append(PictureIn(copy.blocks[0], error))
        return news

    def _other_patches(self, copy: PictureCopy) -> str | None:
        """Reason why what lies in memory are not this picture's patches, or None."""
        if self._memory is None:
            return None
        patches = self._memory[copy.segment : copy.segment + 4 * copy.rows * copy.columns]
        found = blake2b(patches, digest_size=16).digest()
        known = self._patches.setdefault((copy.picture, copy.grid), found)
        return None if known == found else "the picture's patches differ from those it had before"

    def encode(self, pictures: int, adapter: Callable[[PictureCopy], str]) -> Encoded:
        """adapter: the name of that which changes the tower, as of `seen_by`."""
        assert pictures > 0
        if not self._passing:
            copies = [self._here.popleft() for _ in range(pictures)]
            self._passing = [(copy, adapter(copy)) for copy in copies]
            self.most_passing = max(self.most_passing, pictures)
        self._chunks += 1
        assert pictures == len(self._passing)
        if self._chunks < CHUNKS:
            return Encoded(is_last=False)
        for copy, name in self._passing:
            assert adapter(copy) == name, "another adapter came meanwhile"
            for number, block in enumerate(copy.blocks):
                self._results[block] = (seen_by(copy.picture, name), copy.grid, number)
        self._passing, self._chunks = [], 0
        return Encoded(is_last=True)

    def forget(self) -> None:
        self._coming.clear()
        self._here.clear()
        self._passing, self._chunks = [], 0

    def ids(self, placed: PlacedPicture) -> list[int]:
        """The ids that the placeholders of a picture count as, by what its blocks hold now."""
        assert self._limits is not None
        size, found = self._limits.block_tokens, list[int]()
        for number, block in enumerate(placed.blocks):
            picture, grid, of = self._results.get(block, ("nothing", (0, 0, 0), -1))
            assert (grid, of) == (placed.grid, number), "a block of another picture"
            found += [pictured_id(picture, grid, number * size + i) for i in range(size)]
        return found[: self._limits.form.tokens(placed.grid)]
