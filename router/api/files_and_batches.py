"""OpenAI's `/v1/files` and `/v1/batches`: bodies, form fields, queries and answers. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from loraplex.router.api.request.body import decode_body, require, whole_number
from loraplex.router.call import RequestError
from loraplex.router.policy.batch_limits import LEAST_EXPIRY_S, MOST_EXPIRY_S

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UploadPurpose = Literal["batch", "vision", "user_data"]
FilePurpose = UploadPurpose | Literal["batch_output"]


class FileObject(msgspec.Struct, frozen=True):
    """A stored file. Times are Unix seconds. status: a file that can be asked for is whole."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    status_details: None = None
    object: Literal["file"] = "file"

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class FileList(msgspec.Struct, frozen=True):
    """Page of a caller's files. first_id, last_id: of `data`; null when it is empty."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    deleted: Literal[True] = True
    object: Literal["file"] = "file"


class BatchLineError(msgspec.Struct, frozen=True):
    """Why a batch failed as a whole. Bad lines are answered in the error file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchLineError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of the input: all, and those answered in the output file and in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, frozen=True):
    """A batch. Times are Unix seconds; those that have not come are null."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct, frozen=True):
    """Page of a caller's batches. first_id, last_id: of `data`; null when it is empty."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED = 1000
USUAL_BATCHES_LISTED = 20
_MOST_HOURS = 24 * 14
_WINDOW_PATTERN = r"^([1-9][0-9]{0,2})([hd])\Z"
_WINDOW = re.compile(_WINDOW_PATTERN)
_HOURS = {"h": 1, "d": 24}

MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataText = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataText], Meta(max_length=16)]
ExpirySeconds = Annotated[int, Meta(ge=LEAST_EXPIRY_S, le=MOST_EXPIRY_S)]
Order = Literal["asc", "desc"]


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time after which a file expires. seconds: from a file's creation."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class CreateBatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a request for a new batch. completion_window: hours or days, as `24h` or `7d`.
    output_expires_after: of the files that the batch makes.
    """

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Meta(pattern=_WINDOW_PATTERN)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class UploadForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of an upload, for its description: the form itself is read as it comes."""

    file: bytes
    purpose: UploadPurpose
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name="expires_after[anchor]")
    seconds: ExpirySeconds | None = msgspec.field(default=None, name="expires_after[seconds]")


FORM_FIELDS = tuple(field.encode_name for field in msgspec.structs.fields(UploadForm))


class ListQuery(msgspec.Struct, frozen=True):
    """A page of a list. after: the id that the page before ended with. purpose: "" = any."""

    limit: int
    after: str = ""
    order: Order = "desc"
    purpose: str = ""


def parse_create(body: bytes, endpoints: tuple[str, ...]) -> tuple[CreateBatchBody, int]:
    """Reads a request for a batch, and its window in seconds. Raises RequestError."""
    wanted, _ = decode_body(body, CreateBatchBody)
    require(
        wanted.endpoint in endpoints,
        f"expected one of {', '.join(endpoints)}; got {wanted.endpoint[:80]!r}",
        "endpoint",
    )
    match = _WINDOW.fullmatch(wanted.completion_window)
    hours = 0 if match is None else int(match[1]) * _HOURS[match[2]]
    require(
        0 < hours <= _MOST_HOURS,
        f"expected hours or days, as 24h or 7d, at most {_MOST_HOURS // 24}d",
        "completion_window",
    )
    return wanted, hours * 3600


def parse_form(fields: Mapping[str, str], usual_expiry_s: int) -> tuple[UploadPurpose, int]:
    """Reads an upload's form: its purpose, and the seconds it is kept. Raises RequestError."""
    try:
        purpose = msgspec.convert(fields.get("purpose"), UploadPurpose)
    except msgspec.ValidationError:
        known, given = " or ".join(get_args(UploadPurpose)), fields.get("purpose")
        message = f"`purpose`: expected {known}, got {given!r:.80}"
        raise RequestError("invalid", message, param="purpose") from None
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, usual_expiry_s
    require(anchor == "created_at", "expected 'created_at'", "expires_after[anchor]")
    seconds_kept = whole_number(
        seconds or "", LEAST_EXPIRY_S, MOST_EXPIRY_S, "expires_after[seconds]"
    )
    return purpose, seconds_kept


def parse_list(query: Mapping[str, str], usual: int, most: int) -> ListQuery:
    """Reads which page of a list is wanted. Raises RequestError."""
    order = query.get("order", "desc")
    require(order in ("asc", "desc"), f"expected asc or desc, got {order[:80]!r}", "order")
    limit = whole_number(query.get("limit", str(usual)), 1, most, "limit")
    newest_last: Order = "asc" if order == "asc" else "desc"
    return ListQuery(limit, query.get("after", ""), newest_last, query.get("purpose", ""))


def page_of(ids: Sequence[str], query: ListQuery) -> tuple[list[str], bool]:
    """The ids of the page, and whether more follow. Ids sort by the time of their making."""
    is_newest_first = query.order == "desc"
    ordered = sorted(ids, reverse=is_newest_first)
    if query.after:
        ordered = [one for one in ordered if (one < query.after) is is_newest_first]
        ordered = [one for one in ordered if one != query.after]
    return ordered[: query.limit], len(ordered) > query.limit
