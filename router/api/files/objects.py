"""Answers of `/v1/files` and `/v1/batches`, in OpenAI's shapes. Pure."""

from typing import Literal

import msgspec

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
FilePurpose = Literal["batch", "batch_output"]


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


class FileList(msgspec.Struct, frozen=True):
    """first_id, last_id: of `data`; null when it is empty."""

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
    """first_id, last_id: of `data`; null when it is empty."""

    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
