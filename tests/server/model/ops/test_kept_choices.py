"""Ways of products that one start chose, and the next one takes."""

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from triton import knobs
from triton.runtime.cache import FileCacheManager

from loraplex.server.kernels.launch.configs import load_configs
from loraplex.server.model.linear.dense import LIBRARIES, DenseLinear, Way
from loraplex.server.model.ops.cuda import lora_linear
from loraplex.server.model.ops.cuda.kept_choices import KeptChoices
from loraplex.server.model.ops.cuda.lora_linear import Products
from tests.server.model import fake_flashinfer

OTHER, THIRD = LIBRARIES[1], LIBRARIES[2]
CACHE = partial(FileCacheManager, "key")


class Starts:
    """Starts on one machine. measured: numbers of ways that were timed, of each product."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.measured: list[int] = []
        self.fastest: Way = OTHER
        patch.setattr(lora_linear, "_times", self._times)

    def _times(self, ways: list[Way], *_: object) -> dict[Way, float]:
        self.measured.append(len(ways))
        return {way: 0.5 if way == self.fastest else 1.0 for way in ways}

    def start(self, sizes: list[int], *shapes: tuple[int, int]) -> list[Way]:
        """The ways of each size and shape."""
        of, kept = Products(load_configs("cpu")), KeptChoices(CACHE)
        of.measure(sizes, [[DenseLinear(torch.zeros(shape))] for shape in shapes], kept)
        kept.save()
        return [of._choices[size, shape].alone for size in sizes for shape in shapes]


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return Starts(monkeypatch)


def test_the_next_start_measures_nothing_again(starts: Starts) -> None:
    assert starts.start([1, 4], (48, 32)) == [OTHER, OTHER]
    starts.fastest = THIRD
    assert starts.start([1, 4], (48, 32)) == [OTHER, OTHER]
    assert len(starts.measured) == 2
    assert starts.start([1, 8], (48, 32)) == [OTHER, THIRD]
    assert starts.start([8, 4, 1], (48, 32)) == [THIRD, OTHER, OTHER]
    assert len(starts.measured) == 3


def test_starts_of_two_models_keep_the_choices_of_both(tmp_path: Path, starts: Starts) -> None:
    first, second = (KeptChoices(CACHE) for _ in range(2))
    first.keep(1, (4, 4), ["a", "b"])
    second.keep(1, (8, 4), ["c", "d"])
    first.save()
    second.save()
    found = KeptChoices(CACHE)
    assert (found.find(1, (4, 4)), found.find(1, (8, 4))) == (["a", "b"], ["c", "d"])
    assert found.find(2, (4, 4)) == []


def test_the_next_start_knows_that_all_is_compiled(starts: Starts) -> None:
    kept = KeptChoices(CACHE)
    assert not kept.are_compiled
    kept.keep_compiled()
    assert KeptChoices(CACHE).are_compiled
    assert not KeptChoices(partial(FileCacheManager, "of another model")).are_compiled


@pytest.mark.usefixtures("starts")
def test_devices_of_a_group_compile_together_unless_all_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_flashinfer.install(monkeypatch)
    from loraplex.server.model.graphs.fast_path import compile_together

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    parts, launched = Mock(weights=Mock(linears=())), list[int]()
    for others, expected in ((1, [1]), (0, [1, 0]), (1, [1, 0])):
        parts.group.least = partial(min, others)
        compile_together(partial(launched.append, others), parts, ())
        assert launched == expected


@pytest.mark.parametrize("text", ["", "[1]", '{"1 (48, 32)": ["gone", "gone"]}', "{"])
def test_what_names_no_way_is_measured(text: str, starts: Starts) -> None:
    FileCacheManager("key").put(text, "ways_of_products", binary=False)
    assert starts.start([1], (48, 32)) == [OTHER]
    assert len(starts.measured) == 1


def test_a_folder_that_cannot_be_keeps_nothing() -> None:
    def none() -> FileCacheManager:
        raise PermissionError("read-only")

    kept = KeptChoices(none)
    assert kept.find(1, (4, 4)) == []
    kept.keep(1, (4, 4), ["a", "b"])
    with pytest.raises(PermissionError):
        kept.save()
