"""Adapters on a Hugging Face Hub, through huggingface_hub; its endpoint and offline mode hold."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import HfApi, HfFileMetadata, get_session, hf_hub_url

# HTTPError is the transport's own: httpx's or httpx2's, by the library's version.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
)

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.adapters.peft.files import weight_files
from loraplex.adapters.ref import AdapterRef, check_token, format_ref, hub_place, is_pinned
from loraplex.adapters.sources.partial import RemoteBytes, fetch_resumable, range_start

DEFAULT_TIMEOUT_S = 10.0
_RETRY_S = 5.0
_MAX_RETRY_S = 300.0


class HubSource:
    """Fetches adapters from the Hugging Face Hub. endpoint: None = the library's own
    (`HF_ENDPOINT`). owners: those allowed; none = all.

    Without a token calls are anonymous: credentials stored on this machine are not used.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        owners: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._api = HfApi(endpoint=endpoint, token=False, library_name="loraplex")
        self._owners = frozenset(owners)
        self._timeout_s = timeout_s

    def resolve(self, ref: AdapterRef, token: str | None) -> AdapterRef:
        """Pins a reference to a commit. It asks the Hub, so this caller may read it."""
        check_token(token)
        info = self._info(ref, token, files=False)
        pinned = AdapterRef("hub", ref.name, info.sha)
        if not is_pinned(pinned):
            raise AdapterError("unavailable", f"the Hub named no commit for {format_ref(ref)}")
        if info.gated:  # anyone may look at a gated repository; only its files are kept back
            with _hub_errors(ref, has_token=token is not None):
                self._metadata(pinned, token, CONFIG_FILE)
        return pinned

    def list_files(self, ref: AdapterRef, token: str | None) -> dict[str, int]:
        """Lists files in the folder that the reference names, or at the repository's top."""
        found = self._beneath(ref, token, sizes=True)
        if not found and hub_place(ref.name)[1]:
            raise AdapterError("not_found", f"{format_ref(ref)}: the repository has no such folder")
        return {name: size for name, size in found.items() if "/" not in name}

    def adapters_in(self, ref: AdapterRef, token: str | None) -> Sequence[str]:
        try:
            found = self._beneath(ref, token, sizes=False)
        except AdapterError:
            return ()
        folders: defaultdict[str, list[str]] = defaultdict(list)
        for path in found:
            folder, _, name = path.rpartition("/")
            folders[folder].append(name)
        return [
            folder
            for folder, names in folders.items()
            if CONFIG_FILE in names and weight_files(names)
        ]

    def fetch_file(self, ref: AdapterRef, token: str | None, name: str, folder: Path) -> None:
        """Fetches by plain HTTP, which can resume, in another process too."""
        self._check_owner(ref)
        with _hub_errors(ref, has_token=token is not None):
            found = self._metadata(ref, token, name)
            if found.size is None or found.commit_hash not in (None, ref.revision):
                raise _unreachable(format_ref(ref))
            fetch_resumable(
                folder / name,
                found.size,
                lambda offset: self._open(ref, found.location, token, offset),
                self._clock,
            )

    def _beneath(self, ref: AdapterRef, token: str | None, sizes: bool) -> dict[str, int]:
        """Path within the folder that the reference names -> bytes, or 0 without `sizes`."""
        folder = hub_place(ref.name)[1]
        start = f"{folder}/" if folder else ""
        return {
            file.rfilename.removeprefix(start): file.size or 0
            for file in self._info(ref, token, files=sizes).siblings or []
            if file.rfilename.startswith(start)
        }

    def _info(self, ref: AdapterRef, token: str | None, files: bool) -> ModelInfo:
        self._check_owner(ref)
        with _hub_errors(ref, has_token=token is not None):
            return self._api.model_info(
                hub_place(ref.name)[0],
                revision=ref.revision,
                timeout=self._timeout_s,
                files_metadata=files,
                token=token or False,
            )

    def _metadata(self, ref: AdapterRef, token: str | None, name: str) -> HfFileMetadata:
        """Finds a file's address for this caller, and its size."""
        repository, folder = hub_place(ref.name)
        url = hf_hub_url(
            repository,
            name,
            subfolder=folder,
            revision=ref.revision,
            endpoint=self._api.endpoint,
        )
        return self._api.get_hf_file_metadata(
            url=url, token=token or False, timeout=self._timeout_s
        )

    @contextmanager
    def _open(
        self, ref: AdapterRef, location: str, token: str | None, offset: int
    ) -> Iterator[RemoteBytes]:
        """Opens a file at an offset. location: the Hub's, or a storage's, without credential."""
        own = urlsplit(location).netloc == urlsplit(self._api.endpoint).netloc
        headers = build_hf_headers(token=(token or False) if own else False)
        headers["accept-encoding"] = "identity"
        if offset:
            headers["range"] = f"bytes={offset}-"
        with get_session().stream(
            "GET", location, headers=headers, timeout=self._timeout_s
        ) as answer:
            hf_raise_for_status(answer)
            start = range_start(answer.status_code, answer.headers.get("content-range"))
            yield RemoteBytes(start, answer.iter_raw())

    def _check_owner(self, ref: AdapterRef) -> None:
        owner = ref.name.partition("/")[0]
        if self._owners and owner not in self._owners:
            raise AdapterError("forbidden", f"adapters of {owner!r} are not allowed here")


@contextmanager
def _hub_errors(ref: AdapterRef, has_token: bool) -> Iterator[None]:
    """Maps the library's errors. Their texts stay inside: they hold addresses and request ids."""
    name = format_ref(ref)
    try:
        yield
    except HFValidationError:
        raise AdapterError("bad_ref", f"{name} is not a name that the Hub allows") from None
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise _refusal(name, error, has_token) from None
    except OfflineModeIsEnabled:
        message = f"{name} cannot be fetched: HF_HUB_OFFLINE is set"
        raise AdapterError("unavailable", message, (), _MAX_RETRY_S) from None
    except HTTPError:
        raise _unreachable(name) from None
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
            raise  # the disk's, not the Hub's
        raise _unreachable(name) from None
    except (ValueError, TypeError, KeyError, RuntimeError):
        # What the library raises when an answer is not what a Hub says.
        raise _unreachable(name) from None


def _refusal(name: str, error: Exception, has_token: bool) -> AdapterError:
    """Makes an AdapterError of the Hub's answer, or of its silence."""
    if isinstance(error, LocalEntryNotFoundError):
        cause = error.__cause__
        return _http_error(name, cause) if isinstance(cause, HfHubHTTPError) else _unreachable(name)
    if isinstance(error, GatedRepoError | DisabledRepoError):
        message = f"{name} is gated or disabled: this token has not been granted access"
        return AdapterError("forbidden", message)
    if isinstance(error, RepositoryNotFoundError):
        return _missing(name, error, has_token)
    if isinstance(error, RevisionNotFoundError | EntryNotFoundError):
        return AdapterError("not_found", f"{name}: no such revision or file")
    if isinstance(error, HfHubHTTPError):
        return _http_error(name, error)
    return _unreachable(name)


def _missing(name: str, error: RepositoryNotFoundError, has_token: bool) -> AdapterError:
    """The error for a missing file. To anonymous callers the Hub hides things by a 401."""
    if error.response.status_code == 401 and has_token:
        return AdapterError("unauthorized", f"the Hub does not accept the token given for {name}")
    hint = "this token cannot read it" if has_token else "it needs a token"
    return AdapterError("not_found", f"{name} does not exist on the Hub, or {hint}")


def _http_error(name: str, error: HfHubHTTPError) -> AdapterError:
    status = error.response.status_code
    if status == 401:
        return AdapterError("unauthorized", f"the Hub asks for a valid token for {name}")
    if status == 403:
        return AdapterError("forbidden", f"the Hub refuses access to {name}")
    if status in (404, 410):
        return AdapterError("not_found", f"{name} does not exist on the Hub")
    if 400 <= status < 500 and status not in (408, 429):
        return AdapterError("not_found", f"the Hub refuses {name} (HTTP {status})")
    retry_after = error.response.headers.get("retry-after", "")
    delay = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else _RETRY_S
    message = f"the Hub cannot serve {name} now (HTTP {status})"
    return AdapterError("unavailable", message, (), min(delay, _MAX_RETRY_S))


def _unreachable(name: str) -> AdapterError:
    return AdapterError("unavailable", f"the Hub cannot be reached for {name}", (), _RETRY_S)
