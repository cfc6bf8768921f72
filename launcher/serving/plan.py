"""The plan of `serve`: options, demo and adapter names turned into two configurations."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import local_name, name_fault, parse_ref
from loraplex.launcher.demo import BASE_NAME, EXAMPLES, adapter_paths, model_path
from loraplex.launcher.options import OptionError, Values, build, path_of
from loraplex.launcher.serving.local_bases import (
    LocalBase,
    beside,
    name_of,
    named_models,
    under_name,
)
from loraplex.launcher.worker_groups import AskedGroups, undivided
from loraplex.router.config import RouterConfig
from loraplex.server.config import WorkerConfig

LOOPBACK = "127.0.0.1"
# An apostrophe would need escaping in a curl line.
DEMO_EXAMPLE = next(text for text in EXAMPLES if "'" not in text)


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
