"""From what the operator calls the model to a folder: a local one, or a download from the Hub.

The library for the Hub takes its time to load: it is imported for models of the Hub alone.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.errors import CommandError
from loraplex.server.model.checkpoint.checkpoint import check_folder, read_config
from loraplex.server.model.spec.model_spec import ModelSpec

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[^/]+/?$")


class ModelError(CommandError):
    """The model cannot be had; str() is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Folder that holds a model. names: what people and adapters call it, the best first. revision:
    a commit, or None.
    """

    path: Path
    names: tuple[str, ...]
    revision: str | None


def find_model(text: str, revision: str | None) -> ModelFolder:
    """A folder that exists, or else a Hub id. Blocks while downloading. Raises ModelError.

    A model of the Hub whose configuration cannot be served is refused before its weights come.
    """
    folder = local_folder(text)
    if folder is not None:
        if revision is not None:
            raise ModelError(f"--revision is for models of the Hub; {text} is a folder")
        return ModelFolder(folder, _folder_names(folder), None)
    from loraplex.server.worker.process.hub_model import download

    path, commit = download(text, revision)
    return ModelFolder(path, (text,), commit)


def check_model(text: str, revision: str | None, *, with_tensors: bool = True) -> ModelSpec:
    """The model of a configuration, or the sentence with which a worker would refuse it.

    with_tensors: of a folder, that its weights fit, too; of the Hub only small files come. Raises
    ModelError, CheckpointError.
    """
    folder = local_folder(text)
    if folder is not None:
        with _readable(text):
            return check_folder(folder, with_tensors=with_tensors)
    from loraplex.server.worker.process.hub_model import read_spec

    return read_spec(text, revision)


def describe_model(text: str, revision: str | None) -> ModelSpec:
    """Read the spec of a model, or of a `config.json` alone, and check that it is served. Raises
    ModelError, CheckpointError.
    """
    path = Path(text).expanduser()
    with _readable(text):
        is_file = path.is_file()
    return read_config(path.parent, path.name) if is_file else check_model(text, revision)


def local_folder(text: str) -> Path | None:
    """The folder that is meant; None = a Hub id is. Raises ModelError for what is neither."""
    folder = Path(text).expanduser()
    with _readable(text):
        is_folder, is_file = folder.is_dir(), folder.is_file()
    if is_folder:
        return folder
    if is_file:
        raise ModelError(f"{text} is a file; a model is a folder with config.json and safetensors")
    if text.startswith(("/", ".", "~")) or text.count("/") > 1:
        raise ModelError(f"there is no folder {text}")
    return None


@contextmanager
def _readable(text: str) -> Iterator[None]:
    """Errors of the disk inside are raised as ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{text[:100]} cannot be read: {error.strerror or error}") from error


def _folder_names(folder: Path) -> tuple[str, ...]:
    """A snapshot in the Hub's cache is still called by its Hub id. Paths stay with the operator."""
    resolved = folder.resolve()
    snapshot = _SNAPSHOT.search(str(resolved)) or _SNAPSHOT.search(str(folder))
    hub_id = [f"{snapshot[1]}/{snapshot[2]}"] if snapshot else []
    # A link is called by its own name as well as by what it leads to.
    own = Path(os.path.abspath(folder)).name
    return tuple(dict.fromkeys([*hub_id, own, resolved.name]))
