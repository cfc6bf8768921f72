"""How a machine's GPUs are divided among the workers of `loraplex serve`. Pure."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from loraplex.adapters.common.option import option
from loraplex.launcher.options import OptionError

# Whether GPUs hold a model, each a part: not at all, with little room for keys and values, or well.
Fit = Literal["no", "tight", "well"]


@dataclass(frozen=True, slots=True)
class AskedGroups:
    """Options of `loraplex serve` alone. None = it is chosen here."""

    worker_count: int | None = option(
        None,
        "copies of the model on this machine, each on GPUs of its own (auto: as many as"
        " its GPUs hold; on a CPU one)",
        flag="workers",
        min=1,
        max=64,
        unset="auto",
    )
    tp: int | None = option(
        None,
        "GPUs of a worker, each with a part of every matrix (tensor parallelism); on a"
        " CPU processes (auto: as few as hold the model)",
        min=1,
        max=64,
        unset="auto",
    )
    also: tuple[str, ...] = option(
        (),
        "[NAME=]MODEL, a further base model beside the first: a Hub id or folder, with adapters"
        " of its own",
        flag="also",
    )

    @property
    def least(self) -> int:
        """Counts the GPUs that the options ask for at least."""
        return (self.worker_count or 1) * (self.tp or 1)


@dataclass(frozen=True, slots=True)
class WorkerGroups:
    """Groups of GPUs. tp: GPUs of a worker; on a CPU its processes. gpus: each worker's, by place
    among those that are shown; () = the CPU, or the only GPU. why: for a person."""

    tp: int
    gpus: tuple[tuple[int, ...], ...]
    why: str

    @property
    def workers(self) -> int:
        return len(self.gpus)

    @property
    def are_several(self) -> bool:
        """Whether several workers or processes run, or GPUs were chosen among several."""
        return self.workers > 1 or self.tp > 1 or any(self.gpus)

    def written(self) -> str:
        """The groups as options, with the reason."""
        return f"--workers {self.workers} --tp {self.tp}: {self.why}"


def undivided(asked: AskedGroups, place: str) -> WorkerGroups:
    """The groups that are asked for, else one worker. place: where it computes, for a person."""
    workers, tp = asked.worker_count or 1, asked.tp or 1
    return WorkerGroups(tp, ((),) * workers, f"{_counted(workers, 'worker')} on {place}")


def divide(
    asked: AskedGroups,
    gpus: Sequence[Hashable],
    counts: Sequence[int],
    fit: Callable[[int], Fit],
) -> WorkerGroups:
    """Divides GPUs into workers. gpus: at least one; equal ones are alike. counts: of GPUs that can
    share the model, the least first. fit: of so many GPUs. Raises OptionError for more than
    there is.

    What is not asked for: a worker has as few GPUs as hold the model well, and there are as many
    workers as GPUs like the first one allow. Asked for, the others count too.
    """
    _check_room(asked, len(gpus))
    if len(gpus) == 1:
        return undivided(asked, "the GPU")
    order = sorted(range(len(gpus)), key=lambda place: gpus[place] != gpus[0])
    alike = sum(gpu == gpus[0] for gpu in gpus)
    room = alike if asked.least <= alike else len(gpus)
    tp = asked.tp or _fewest(room // (asked.worker_count or 1), counts, fit)
    workers = asked.worker_count or max(1, alike // tp)
    groups = tuple(tuple(order[i * tp : (i + 1) * tp]) for i in range(workers))
    return WorkerGroups(tp, groups, _why(asked, tp, workers, len(gpus), len(gpus) - alike))


def _check_room(asked: AskedGroups, gpus: int) -> None:
    if asked.least <= gpus:
        return
    given = {"--workers": asked.worker_count, "--tp": asked.tp}
    named = " ".join(f"{name} {count}" for name, count in given.items() if count is not None)
    shown = _counted(gpus, "GPU")
    raise OptionError(f"{named}: that takes {asked.least} GPUs, and this machine shows {shown}")


def _fewest(most: int, counts: Sequence[int], fit: Callable[[int], Fit]) -> int:
    """The fewest GPUs that fit well, else that fit. most: of a worker. Raises OptionError."""
    fits = {count: fit(count) for count in counts if count <= most}
    for wanted in ("well", "tight"):
        found = next((count for count, how in fits.items() if how == wanted), None)
        if found is not None:
            return found
    raise OptionError(
        f"the model does not fit {_counted(most, 'GPU')} a worker; `loraplex info MODEL` says what"
        " it needs: lower --workers or memory options, or take larger GPUs"
    )


def _why(asked: AskedGroups, tp: int, workers: int, gpus: int, unlike: int) -> str:
    used = f"{_counted(workers, 'worker')} of {_counted(tp, 'GPU')}"
    if asked.tp is None:
        used += f", since {_counted(tp, 'GPU')} {'holds' if tp == 1 else 'hold'} the model"
    left = gpus - tp * workers
    if not left:
        return used
    reason = " unlike the first" if left == unlike else ""
    return f"{used}; {_counted(left, 'GPU')}{reason} not used"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
