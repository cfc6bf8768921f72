"""A model of the Hub: pinned to a commit, checked, and downloaded.

Only safetensors, JSON and tokenizer files are downloaded.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePath

import msgspec
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import ModelInfo

# The HTTP library that huggingface_hub itself uses; its name has changed between releases.
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

from loraplex.adapters.chat.conversation import TEMPLATE_FILE, TEMPLATE_FOLDER
from loraplex.server.model.checkpoint.checkpoint import UnservedError, read_config
from loraplex.server.model.checkpoint.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    without_config,
    without_weights,
)
from loraplex.server.model.checkpoint.processor_files import FILES as PROCESSOR_FILES
from loraplex.server.model.checkpoint.sentence_files import (
    DENSE_WEIGHTS,
    LENGTH_FILE,
    MODULES_FILE,
    PROMPTS_FILE,
)
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.tokenizer.base_tokenizer import BYTE_LEVEL_FILES
from loraplex.server.worker.process.model_source import ModelError

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 5.0
DOWNLOADS = 8
METADATA_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    *PROCESSOR_FILES,
    "tokenizer.json",
    *BYTE_LEVEL_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "chat_template.json",
    MODULES_FILE,
    PROMPTS_FILE,
    LENGTH_FILE,
    INDEX_FILE,
)
# Of sentence-transformers' modules: `1_Pooling/config.json`, `2_Dense/model.safetensors`.
_MODULE_FILES = (f"[0-9]*_*/{CONFIG_FILE}", f"[0-9]*_Dense/{DENSE_WEIGHTS}")


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: tensor -> shard."""

    weight_map: dict[str, str]


def download(repo: str, revision: str | None) -> tuple[Path, str]:
    """Downloads a model. Gives its folder and commit. Blocks. Raises ModelError."""
    with _explained(repo, revision):
        return _download(repo, revision)


def read_spec(repo: str, revision: str | None) -> ModelSpec:
    """Read a model's spec from small files, downloaded. Raises ModelError, CheckpointError."""
    with _explained(repo, revision):
        folder = _config_folder(repo, revision)
        with suppress(RemoteEntryNotFoundError, LocalEntryNotFoundError):
            hf_hub_download(repo, MODULES_FILE, revision=folder.name)
        return read_config(folder)


def _download(repo: str, revision: str | None) -> tuple[Path, str]:
    folder = _config_folder(repo, revision)
    commit = folder.name
    try:
        info = HfApi().model_info(repo, revision=commit, files_metadata=True)
    except (OfflineModeIsEnabled, httpx.TransportError):
        log.warning("the Hub cannot be reached; %s is taken from the cache (%.12s)", repo, commit)
        return folder, commit
    files = _wanted_files(repo, commit, info)
    fetch = partial(hf_hub_download, repo, revision=commit)
    if MODULES_FILE in files:  # whose word counts before the weights come
        fetch(MODULES_FILE)
        _check(repo, folder)
    total = _bytes_of(info, files)
    log.info("model %s at %.12s: %s in %d files", repo, commit, gigabytes(total), len(files))
    with _Progress(repo, total), ThreadPoolExecutor(DOWNLOADS) as pool:
        for _ in pool.map(fetch, files):
            pass
    return folder, commit


@contextmanager
def _explained(text: str, revision: str | None) -> Iterator[None]:
    """Errors of the Hub inside are raised as ModelError."""
    try:
        yield
    except HFValidationError as error:
        raise ModelError(f"{text!r} is neither a folder nor a Hub id (org/name)") from error
    except (HfHubHTTPError, OSError, httpx.HTTPError) as error:
        raise ModelError(_explain(text, revision, error)) from error


def _config_folder(repo: str, revision: str | None) -> Path:
    """Return the folder of the model's configuration, once it is known that it can be served."""
    # The library keeps what a branch meant, and finds it again when the Hub cannot be reached.
    try:
        folder = Path(hf_hub_download(repo, CONFIG_FILE, revision=revision)).parent
    except RemoteEntryNotFoundError:
        raise ModelError(f"{repo} {without_config(_files(repo, revision), repo)}") from None
    _check(repo, folder)
    return folder


def _check(repo: str, folder: Path) -> None:
    """Check a model's configuration. Raises ModelError where it cannot be served."""
    try:
        read_config(folder)
    except UnservedError as error:
        raise ModelError(f"{repo}: {error.reason}") from error


def _files(repo: str, revision: str | None) -> list[str]:
    """Names of the files at a repository's root."""
    siblings = HfApi().model_info(repo, revision=revision).siblings or ()
    return [sibling.rfilename for sibling in siblings if "/" not in sibling.rfilename]


def _wanted_files(repo: str, commit: str, info: ModelInfo) -> list[str]:
    present = {sibling.rfilename for sibling in info.siblings or ()}
    wanted = [name for name in METADATA_FILES if name in present]
    patterns = (f"{TEMPLATE_FOLDER}/*.jinja", *_MODULE_FILES)
    wanted += sorted(name for name in present if any(map(PurePath(name).match, patterns)))
    if INDEX_FILE in present:
        index = Path(hf_hub_download(repo, INDEX_FILE, revision=commit))
        shards = _shards(repo, index.read_bytes())
    else:
        shards = [WEIGHTS_FILE]
    if shards == [WEIGHTS_FILE] and WEIGHTS_FILE not in present:
        here = [name for name in present if "/" not in name]
        raise ModelError(f"{repo} {without_weights(here, repo)}")
    absent = [shard for shard in shards if shard not in present]
    if absent or not shards:
        raise ModelError(
            f"{repo} has no safetensors weights ({', '.join(absent[:3])} missing); "
            "other formats are never opened"
        )
    return wanted + shards


def _shards(repo: str, index: bytes) -> list[str]:
    try:
        return sorted(set(msgspec.json.decode(index, type=_Index).weight_map.values()))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"{repo}: {INDEX_FILE} cannot be read ({error})") from error


def _bytes_of(info: ModelInfo, files: Iterable[str]) -> int:
    chosen = set(files)
    return sum(s.size or 0 for s in info.siblings or () if s.rfilename in chosen)


def _explain(repo: str, revision: str | None, error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo} and set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo} is no folder here and no model on the Hub that this machine may see "
            "(a private one needs HF_TOKEN)"
        )
    if isinstance(error, OfflineModeIsEnabled | httpx.TransportError | LocalEntryNotFoundError):
        return (
            f"{repo} is no folder here and was not downloaded before, and the Hub cannot be "
            f"reached ({type(error).__name__}): check the network, HF_ENDPOINT, HF_HUB_OFFLINE"
        )
    if isinstance(error, HfHubHTTPError):
        return f"the Hub refused {repo}: {str(error).splitlines()[0]}"
    return f"{repo} cannot be downloaded: {error}"


class _Progress:
    """Says every few seconds how much of a download lies on the disk."""

    def __init__(self, repo: str, total: int) -> None:
        self._folder = (
            Path(constants.HF_HUB_CACHE)
            / repo_folder_name(repo_id=repo, repo_type="model")
            / "blobs"
        )
        self._repo = repo
        self._total = total
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _report(self) -> None:
        while not self._done.wait(PROGRESS_INTERVAL_S):
            present = min(_disk_bytes(self._folder), self._total)
            log.info(
                "downloading %s: %s of %s", self._repo, gigabytes(present), gigabytes(self._total)
            )


def _disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            # Space in use, not length: a download may lay the file out in full first.
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"
