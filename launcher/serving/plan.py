"""The plan of `serve`: options, demo and adapter names turned into two configurations."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import local_name, name_fault, parse_ref
from loraplex.launcher.demo import BASE_NAME, EXAMPLES, adapter_paths, model_path
from loraplex.launcher.options import OptionError, Values, build, path_of
from loraplex.launcher.worker_groups import AskedGroups, WorkerGroups, undivided
from loraplex.router.config import RouterConfig
from loraplex.server.config import WorkerConfig

LOOPBACK = "127.0.0.1"
# An apostrophe would need escaping in a curl line.
DEMO_EXAMPLE = next(text for text in EXAMPLES if "'" not in text)


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


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The configurations of all workers, and of the router; adapter names and a prompt for the
    example shown when ready. bases: that of MODEL, and those beside. asked: of groups of GPUs.
    route: of the example, by what the first base gives. all_write: every base gives text."""

    bases: tuple[LocalBase, ...]
    router: RouterConfig
    asked: AskedGroups
    aliases: tuple[str, ...]
    example: str
    route: str = "/generate"
    all_write: bool = True

    @property
    def worker(self) -> WorkerConfig:
        """The config of the first base's workers."""
        return self.bases[0].worker

    @property
    def num_workers(self) -> int:
        return sum(base.groups.workers for base in self.bases)


def plan(values: Mapping[str, Values]) -> ServePlan:
    """The children's configs from options, without a look at GPUs. Raises OptionError."""
    is_demo = values["model"] is None
    aliases: list[str] = []
    roots = [*_paths(values["adapter_roots"]), *_paths(values["watch_folders"])]
    if is_demo:
        given = {text.partition("=")[0] for text in _texts(values["adapters"])}
        for name, path in adapter_paths().items():
            if name in given:
                continue
            aliases.append(f"{name}=local:{path}")
            roots.append(path)
    for text in _texts(values["adapters"]):
        alias, of_alias = resolve_alias(text)
        aliases.append(alias)
        roots.extend(of_alias)
    model = str(model_path()) if is_demo else values["model"]
    roots_value = tuple(dict.fromkeys(roots))
    asked = build(AskedGroups, values)
    tp = values["tp"] or 1
    shared = {**values, "model": model, "adapter_roots": roots_value, "tp": tp}
    worker = with_demo_name(build(WorkerConfig, shared))
    also = named_models(asked.also)
    of_bases: list[str] = []
    if also:
        worker, of_bases = _under_first_name(worker, also)
    router_values = {**values, "workers": (), "adapters": tuple(aliases), "bases": tuple(of_bases)}
    router: RouterConfig = build(RouterConfig, router_values)
    names = tuple(alias.partition("=")[0] for alias in aliases)
    example = DEMO_EXAMPLE if is_demo else "Tell me about llamas."
    # Workers here are the router's beside them, and no other's.
    worker = dataclasses.replace(worker, host=LOOPBACK, port=0, redis="", redis_password="")
    groups = undivided(asked, "this machine")
    configs = (worker, *(beside(worker, name, model) for name, model in also))
    bases = tuple(LocalBase(groups, config) for config in configs)
    return ServePlan(bases, router, asked, names, example)


def _under_first_name(
    worker: WorkerConfig, also: Sequence[tuple[str, str]]
) -> tuple[WorkerConfig, list[str]]:
    """The config of the first base's workers, and the names of all bases. Raises OptionError."""
    first = (*worker.model_names, name_of(worker.model))[0]
    models: dict[str, str] = {first: worker.model}
    for name, model in also:
        if name in models:
            raise OptionError(
                f"--also: {models[name]} and {model} are both called {name!r}; each base needs a "
                "name of its own: --also NAME=MODEL names a further base, --model-name the first"
            )
        models[name] = model
    return under_name(worker, first), [*models]


def with_demo_name(config: WorkerConfig) -> WorkerConfig:
    """A worker's config; the demo model is known by the name that its adapters give it."""
    if not is_demo_model(config.model):
        return config
    names = tuple(dict.fromkeys((BASE_NAME, *config.model_names)))
    return dataclasses.replace(config, model_names=names)


def is_demo_model(text: str) -> bool:
    return os.path.realpath(os.path.expanduser(text)) == os.path.realpath(model_path())


def _paths(value: Values) -> Sequence[Path]:
    return [Path(str(item)) for item in value] if isinstance(value, tuple) else []


def _texts(value: Values) -> Sequence[str]:
    return [str(item) for item in value] if isinstance(value, tuple) else []


def resolve_alias(text: str) -> tuple[str, tuple[Path, ...]]:
    """`NAME=REF`, a path made `local:`, and the roots that allow it alone. Raises OptionError."""
    name, equals, reference = text.partition("=")
    if not equals or not name or not reference:
        raise OptionError(f"--adapter must be NAME=REF, got {text!r}")
    fault = name_fault(name)
    if fault is not None:
        raise OptionError(f"--adapter {text!r}: {fault}")
    path = path_of(reference.removeprefix("local:"), f"--adapter {name}")
    roots: tuple[Path, ...] = ()
    if reference.startswith(("local:", "/", "./", "../", "~")) or os.path.isdir(path):
        folder = path.absolute()
        if not os.path.isdir(folder):
            raise OptionError(f"--adapter {name}: there is no folder {folder}")
        text, roots = f"{name}=local:{local_name(str(folder))}", (folder, *_linked_from(folder))
    try:
        parse_ref(text.partition("=")[2], default_source="hub")
    except AdapterError as error:
        raise OptionError(f"--adapter {name}: {error.message}") from error
    return text, roots


def _linked_from(folder: Path) -> list[Path]:
    """The files of a Hub cache's snapshot: its links lead to `models--…/blobs`."""
    real = Path(os.path.realpath(folder))
    blobs = real.parents[1] / "blobs" if real.parent.name == "snapshots" else None
    return [blobs] if blobs is not None and blobs.is_dir() else []
