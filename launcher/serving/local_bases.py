"""The bases that one `loraplex serve` has on this machine, and the GPUs of each. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from loraplex.launcher.options import OptionError
from loraplex.launcher.worker_groups import AskedGroups, WorkerGroups
from loraplex.server.config import WorkerConfig


class LocalBase(NamedTuple):
    """A base model. groups: GPUs of its workers. worker: their config."""

    groups: WorkerGroups
    worker: WorkerConfig


def named_models(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Name and model of each `[NAME=]MODEL`. Raises OptionError."""
    found = []
    for text in texts:
        name, equals, model = text.partition("=")
        model = model if equals else text
        name = name if equals else name_of(text)
        if not name or not model:
            raise OptionError(f"--also must be MODEL or NAME=MODEL, got {text!r}")
        found.append((name, model))
    return found


def name_of(model: str) -> str:
    """The name of a model that is given without one: a Hub id, or a folder's own name."""
    path = model.rstrip("/")
    is_path = path.startswith(("/", ".", "~")) or path.count("/") > 1
    return path.rpartition("/")[2] if is_path else path


def under_name(config: WorkerConfig, name: str) -> WorkerConfig:
    """A worker's config whose base has this name, before the others."""
    return replace(config, model_names=tuple(dict.fromkeys((name, *config.model_names))))


def beside(first: WorkerConfig, name: str, model: str) -> WorkerConfig:
    """A further model's config: the first's without options about that model alone."""
    return replace(first, model=model, revision=None, model_names=(name,))


def asked_of_each(asked: AskedGroups) -> AskedGroups:
    """The options as they hold for each of several models: one worker, where nothing is said."""
    return replace(asked, worker_count=asked.worker_count or 1)


def shifted(groups: WorkerGroups, left: Sequence[int]) -> WorkerGroups:
    """Groups of the machine's GPUs. groups: of those that were left. left: their places."""
    gpus = tuple(tuple(left[place] for place in group) for group in groups.gpus)
    return replace(groups, gpus=gpus)


def check_room(models: int, gpus: int, *, is_divided: bool) -> None:
    """Raises OptionError where models may not share a machine. is_divided: --kv-memory is given."""
    if models > gpus and not (gpus == 1 and is_divided):
        raise OptionError(
            f"--also: {models} models need {models} GPUs, and this machine shows {gpus}; on one GPU"
            " --kv-memory, --adapter-memory and the like say what each model takes"
        )
