"""Adapters in buckets of S3 and compatibles, through boto3. Needs the extra `s3`.

Endpoint, region and credentials are the process's own, as boto3 finds them (`AWS_*`, profiles,
roles); nothing of them comes from a request.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from boto3.session import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from loraplex.adapters.errors import AdapterError, invalid
from loraplex.adapters.peft.files import is_relevant
from loraplex.adapters.ref import AdapterRef, shown_name
from loraplex.adapters.sources.base import PinnedSource, RemoteFile, changed, refused, unreachable
from loraplex.adapters.sources.partial import RemoteBytes, partial_path

DEFAULT_TIMEOUT_S = 10.0
MAX_PAGES = 10
_PAGE_ENTRIES = 1000
# What a broken connection loses of what had come.
_CHUNK_BYTES = 64 << 10
_CONNECTIONS = 32
_SETUP_RETRY_S = 60.0
_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
)
# Temporary errors that S3 reports with a 4xx status.
_PASSING = frozenset({"RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "Throttling"})
_OF_REGION = frozenset({"PermanentRedirect", "AuthorizationHeaderMalformed"})


class S3Source(PinnedSource):
    """Fetches adapters from S3 buckets. buckets: those that may be read, all others are refused.
    endpoint: None = boto3's own.

    timeout_s: to connect, and between two reads.
    """

    def __init__(
        self,
        buckets: Sequence[str],
        endpoint: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._buckets = frozenset(buckets)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._made: Any = None

    def _fetch(self, ref: AdapterRef, name: str, file: RemoteFile, target: Path) -> None:
        try:
            super()._fetch(ref, name, file, target)
        except FlexibleChecksumError:
            partial_path(target).unlink()
            raise unreachable(ref) from None

    def _check(self, ref: AdapterRef) -> None:
        if _place(ref)[0] not in self._buckets:
            message = (
                f"{shown_name(ref)}: adapters of its bucket are not allowed here (--s3-bucket)"
            )
            raise AdapterError("forbidden", message)

    def _list(self, ref: AdapterRef) -> Mapping[str, RemoteFile]:
        bucket, prefix = _place(ref)
        folder = f"{prefix}/"
        files = {}
        with self._errors(ref):
            pages = (
                self._client()
                .get_paginator("list_objects_v2")
                .paginate(
                    Bucket=bucket,
                    Prefix=folder,
                    Delimiter="/",
                    PaginationConfig={"PageSize": _PAGE_ENTRIES},
                )
            )
            for number, page in enumerate(itertools.islice(pages, MAX_PAGES + 1)):
                if number == MAX_PAGES:
                    message = f"the prefix has more than {MAX_PAGES * _PAGE_ENTRIES} entries"
                    raise invalid("too_many_files", shown_name(ref), message)
                files.update(_relevant(page, folder, ref))
        return files

    @contextmanager
    def _open(
        self, ref: AdapterRef, name: str, file: RemoteFile, offset: int
    ) -> Iterator[RemoteBytes]:
        bucket, prefix = _place(ref)
        part = {"Range": f"bytes={offset}-"} if offset else {}
        with self._errors(ref, reading=True):
            answer = self._client().get_object(
                Bucket=bucket, Key=f"{prefix}/{name}", IfMatch=file.tag, **part
            )
            with closing(answer["Body"]) as body:
                if answer.get("ETag") != file.tag:
                    raise changed(ref)
                start = offset if answer.get("ContentRange") else 0
                yield RemoteBytes(start, body.iter_chunks(_CHUNK_BYTES))

    def _client(self) -> Any:
        """Returns one client for all threads, made anew after one without credentials."""
        with self._lock:
            if self._made is None:
                # At DEBUG it writes what it signs, session tokens included.
                logging.getLogger("botocore").setLevel(logging.INFO)
                self._made = Session().client(
                    "s3",
                    endpoint_url=self._endpoint,
                    config=Config(
                        connect_timeout=self._timeout_s,
                        read_timeout=self._timeout_s,
                        retries={"mode": "standard", "total_max_attempts": 1},
                        max_pool_connections=_CONNECTIONS,
                    ),
                )
            return self._made

    @contextmanager
    def _errors(self, ref: AdapterRef, reading: bool = False) -> Iterator[None]:
        """Maps the library's errors. Their texts stay inside: they hold addresses and key ids.
        reading: files that were listed, so that one that is not there has changed."""
        try:
            yield
        except ClientError as error:
            raise _refusal(ref, error, reading) from None
        except FlexibleChecksumError:
            raise
        except (HTTPClientError, BotoConnectionError, IncompleteReadError):
            raise unreachable(ref) from None
        except _NO_CREDENTIALS:
            with self._lock:
                self._made = None
            message = f"{shown_name(ref)}: the server has no credentials for S3"
            raise AdapterError("unavailable", message, (), _SETUP_RETRY_S) from None
        except (BotoCoreError, ValueError):
            message = f"{shown_name(ref)}: S3 is not set up rightly here, or gave no S3 answer"
            raise AdapterError("unavailable", message, (), _SETUP_RETRY_S) from None


def _place(ref: AdapterRef) -> tuple[str, str]:
    bucket, _, prefix = ref.name.partition("/")
    return bucket, prefix


def _relevant(page: Mapping[str, Any], folder: str, ref: AdapterRef) -> dict[str, RemoteFile]:
    files = {}
    for entry in page.get("Contents", ()):
        name = str(entry.get("Key", "")).removeprefix(folder)
        if is_relevant(name):
            tag, size = entry.get("ETag"), entry.get("Size")
            if not tag or not isinstance(size, int):
                raise unreachable(ref)
            files[name] = RemoteFile(tag, size)
    return files


def _refusal(ref: AdapterRef, error: ClientError, reading: bool) -> AdapterError:
    answer = error.response.get("ResponseMetadata", {})
    status = answer.get("HTTPStatusCode", 0)
    code = error.response.get("Error", {}).get("Code", "")
    if reading and status in (404, 412, 416):
        return changed(ref)
    if code in _OF_REGION:
        message = f"{shown_name(ref)}: the bucket is in another region than the server expects"
        return AdapterError("unavailable", message, (), _SETUP_RETRY_S)
    if code in _PASSING or status < 300:
        status = 503
    return refused(ref, status, answer.get("HTTPHeaders", {}).get("retry-after"))
