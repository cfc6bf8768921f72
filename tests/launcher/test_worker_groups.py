"""How GPUs are divided among workers."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher.options import OptionError
from loraplex.launcher.worker_groups import AskedGroups, Fit, WorkerGroups, divide, undivided

COUNTS = (1, 2, 4, 8)


def fits_from(least: int, tight: int | None = None) -> dict[int, Fit]:
    """Well from `least` GPUs on; tightly on `tight`."""
    return {n: "well" if n >= least else "tight" if n == tight else "no" for n in COUNTS}


def chosen(
    gpus: Sequence[str],
    fits: dict[int, Fit],
    workers: int | None = None,
    tp: int | None = None,
) -> WorkerGroups:
    return divide(AskedGroups(workers, tp), gpus, COUNTS, fits.__getitem__)


@pytest.mark.parametrize(
    ("gpus", "least", "workers", "tp", "groups"),
    [
        (2, 1, None, None, [(0,), (1,)]),
        (2, 2, None, None, [(0, 1)]),
        (3, 2, None, None, [(0, 1)]),
        (4, 2, None, None, [(0, 1), (2, 3)]),
        (8, 1, None, None, [(n,) for n in range(8)]),
        (8, 4, None, None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (4, 1, 2, None, [(0,), (1,)]),
        (4, 2, 1, None, [(0, 1)]),
        (4, 1, None, 2, [(0, 1), (2, 3)]),
        (4, 8, None, 4, [(0, 1, 2, 3)]),
        (4, 1, None, 1, [(0,), (1,), (2,), (3,)]),
        (4, 1, None, 3, [(0, 1, 2)]),
        (4, 8, 1, 1, [(0,)]),
    ],
)
def test_groups(
    gpus: int, least: int, workers: int | None, tp: int | None, groups: list[tuple[int, ...]]
) -> None:
    found = chosen(["H100"] * gpus, fits_from(least), workers, tp)
    assert found.gpus == tuple(groups)
    assert found.tp == len(groups[0])


@pytest.mark.parametrize("fits", [fits_from(1), fits_from(8)])
def test_one_gpu_is_left_as_it_is(fits: dict[int, Fit]) -> None:
    """A worker says itself what it lacks."""
    found = chosen(["H100"], fits)
    assert (found.tp, found.gpus) == (1, ((),))
    assert not found.are_several


def test_a_tight_fit_is_the_last_choice() -> None:
    assert chosen(["H100"] * 4, fits_from(2, tight=1)).tp == 2
    assert chosen(["H100"] * 2, fits_from(4, tight=1)).tp == 1
    assert chosen(["H100"] * 2, fits_from(2, tight=1), workers=2).tp == 1


def test_unlike_gpus_are_used_where_they_are_asked_for() -> None:
    gpus = ["H100", "T4", "H100"]
    found = chosen(gpus, fits_from(1))
    assert found.gpus == ((0,), (2,))
    assert found.written() == (
        "--workers 2 --tp 1: 2 workers of 1 GPU, since 1 GPU holds the model; 1 GPU unlike the"
        " first not used"
    )
    assert chosen(gpus, fits_from(1), workers=3).gpus == ((0,), (2,), (1,))
    assert chosen(gpus, fits_from(1), tp=3).gpus == ((0, 2, 1),)
    assert chosen(["H100", "T4", "T4", "T4"], fits_from(1), tp=2).workers == 1


def test_the_reason_names_what_was_chosen() -> None:
    said = chosen(["H100"] * 3, fits_from(2)).written()
    assert said.startswith("--workers 1 --tp 2: 1 worker of 2 GPUs, since 2 GPUs hold the model;")
    assert said.endswith("; 1 GPU not used")
    asked = chosen(["H100"] * 2, fits_from(1), workers=1, tp=2)
    assert asked.written() == "--workers 1 --tp 2: 1 worker of 2 GPUs"


@pytest.mark.parametrize(
    ("gpus", "workers", "tp", "says"),
    [
        (2, 3, None, "--workers 3: that takes 3 GPUs, and this machine shows 2 GPUs"),
        (1, 2, None, "--workers 2: that takes 2 GPUs, and this machine shows 1 GPU"),
        (2, None, 4, "--tp 4: that takes 4 GPUs, and this machine shows 2 GPUs"),
        (8, 3, 4, "--workers 3 --tp 4: that takes 12 GPUs, and this machine shows 8 GPUs"),
    ],
)
def test_too_many_are_refused_by_name(
    gpus: int, workers: int | None, tp: int | None, says: str
) -> None:
    with pytest.raises(OptionError) as refused:
        chosen(["H100"] * gpus, fits_from(1), workers, tp)
    assert str(refused.value) == says


def test_what_no_group_holds_is_refused() -> None:
    with pytest.raises(OptionError, match=r"does not fit 2 GPUs a worker"):
        chosen(["H100"] * 4, fits_from(4), workers=2)


asked_counts = st.one_of(st.none(), st.integers(1, 9))
machines = st.lists(st.sampled_from(["H100", "T4"]), min_size=2, max_size=9)


@given(machines, asked_counts, asked_counts, st.integers(1, 9))
def test_every_group_is_whole_and_no_gpu_is_in_two(
    gpus: list[str], workers: int | None, tp: int | None, least: int
) -> None:
    try:
        found = chosen(gpus, fits_from(least), workers, tp)
    except OptionError:
        enough = (workers or 1) * (tp or least) <= len(gpus)
        assert not enough or tp is None, "what is asked for and is there is never refused"
        return
    places = [place for group in found.gpus for place in group]
    assert len(set(places)) == len(places)
    assert set(places) <= set(range(len(gpus)))
    assert all(len(group) == found.tp for group in found.gpus)
    assert workers in (None, found.workers)
    assert tp in (None, found.tp)
    if workers is None and found.workers > 1:
        assert len({gpus[place] for place in places}) == 1, "workers are alike"
    left = len([gpu for gpu in gpus if gpu == gpus[0]]) - found.workers * found.tp
    assert workers is not None or left < found.tp, "no further worker would fit"


@given(asked_counts, asked_counts)
def test_without_gpus_it_is_as_asked(workers: int | None, tp: int | None) -> None:
    found = undivided(AskedGroups(workers, tp), "the CPU")
    assert (found.workers, found.tp) == (workers or 1, tp or 1)
    assert found.are_several == ((found.workers, found.tp) != (1, 1))
    assert not any(found.gpus)
