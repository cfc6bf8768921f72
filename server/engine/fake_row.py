"""A row of the executor without a model, and what is said when a plan could not be carried out."""

from loraplex.server.engine.certificates import Mark, certified_vector
from loraplex.server.engine.executor import ExecutorLimits
from loraplex.server.engine.plan import RowStart, SeqSlice


class ContractError(AssertionError):
    """A plan or copy that no executor could carry out correctly."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


class FakeRow:
    """Of the executor without a model."""

    def __init__(self, start: RowStart, limits: ExecutorLimits) -> None:
        self.start = start
        self.tokens = list(start.token_ids)
        short, size = limits.short_context, len(start.token_ids)
        self.kind = b"long" if short is not None and size > short else b""
        self.most_tokens = limits.max_context if self.kind or short is None else short
        # Of each group of layers, by place in the page table.
        self.pages: list[dict[int, int]] = [{} for _ in limits.page_windows]
        self.num_computed = -1  # unknown before the first slice
        self.num_cached = 0
        self.adapter: str | None = None
        self.marks: list[Mark] = []  # after each computed token

    def take_back(self) -> None:
        """A later slice computes the last known token again, for want of a mask."""
        self.num_computed -= 1
        self.marks.pop()

    def vector(self, piece: SeqSlice, limits: ExecutorLimits) -> bytes | None:
        """Of the slice that ends a prompt whose vector is wanted."""
        vector, is_over = piece.vector, self.num_computed >= self.start.prompt_len
        if vector is None:
            return None
        if vector.pooling == "mean":
            check(self.num_cached == 0, "a mean over tokens that were not computed")
        else:
            check(is_over, "a slice for a vector that does not end its prompt")
        return certified_vector(self.marks, vector, limits.num_classes) if is_over else None
