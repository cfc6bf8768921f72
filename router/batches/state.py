"""A batch as it is kept on disk, from its making to its end. Pure."""

from typing import Literal

import msgspec

from loraplex.router.api.files_and_batches import (
    BatchErrors,
    BatchLineError,
    BatchObject,
    BatchStatus,
    RequestCounts,
)

# How a batch ends.
BatchEnd = Literal["completed", "failed", "expired", "cancelled"]


class BatchState(msgspec.Struct, frozen=True):
    """The state of a batch. Times are Unix seconds; 0 = not yet. key_id: whose lines they are; "" =
    no key was needed.

    end: how it will end, from `finalizing` on. output_id, error_id: of the files that it makes;
    has_output, has_errors: they are there. output_expiry_s: for how long they are kept.
    """

    id: str
    tenant: str
    key_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str
    error_id: str
    output_expiry_s: int
    metadata: dict[str, str] | None = None
    status: BatchStatus = "validating"
    end: BatchEnd | None = None
    errors: tuple[BatchLineError, ...] = ()
    counts: RequestCounts = RequestCounts()
    has_output: bool = False
    has_errors: bool = False
    in_progress_at: int = 0
    finalizing_at: int = 0
    cancelling_at: int = 0
    ended_at: int = 0

    @property
    def is_over(self) -> bool:
        return bool(self.ended_at)

    def begun(self, total: int, now: int) -> "BatchState":
        """The state once the batch's input has been read through."""
        return msgspec.structs.replace(
            self,
            status="in_progress",
            in_progress_at=self.in_progress_at or now,
            counts=msgspec.structs.replace(self.counts, total=total),
        )

    def counted(self, completed: int, failed: int) -> "BatchState":
        counts = RequestCounts(self.counts.total, completed, failed)
        return msgspec.structs.replace(self, counts=counts)

    def finalizing(self, end: BatchEnd, now: int) -> "BatchState":
        """The state once every line has an answer, or the batch fails."""
        return msgspec.structs.replace(
            self, status="finalizing", end=end, finalizing_at=self.finalizing_at or now
        )

    def failing(self, code: str, message: str, param: str | None = None) -> "BatchState":
        return msgspec.structs.replace(self, errors=(BatchLineError(code, message, param),))

    def over(self, end: BatchEnd, now: int) -> "BatchState":
        return msgspec.structs.replace(self, status=end, end=end, ended_at=now)

    def shown(self, cancel_asked: int | None = None) -> BatchObject:
        """The batch as a caller sees it. cancel_asked: when somebody asked for its end, which it
        has not come to yet.
        """
        cancelling_at = self.cancelling_at or cancel_asked or 0
        status = self.status
        if cancelling_at and status in ("validating", "in_progress"):
            status = "cancelling"
        return BatchObject(
            id=self.id,
            endpoint=self.endpoint,
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=status,
            created_at=self.created_at,
            expires_at=self.expires_at,
            request_counts=self.counts,
            metadata=self.metadata,
            output_file_id=self.output_id if self.has_output else None,
            error_file_id=self.error_id if self.has_errors else None,
            errors=BatchErrors(list(self.errors)) if self.errors else None,
            in_progress_at=self.in_progress_at or None,
            finalizing_at=self.finalizing_at or None,
            cancelling_at=cancelling_at or None,
            completed_at=self._ended_as("completed"),
            failed_at=self._ended_as("failed"),
            expired_at=self._ended_as("expired"),
            cancelled_at=self._ended_as("cancelled"),
        )

    def _ended_as(self, end: BatchEnd) -> int | None:
        return self.ended_at if self.is_over and self.end == end else None
