"""Where in a prompt an activated adapter begins to act. Pure."""

from array import array
from collections.abc import Sequence


def adapter_from(prompt_ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """The first token of the last occurrence of `invocation`, as in PEFT; None = there is none, and
    the adapter acts on no token. Of an adapter without one 0."""
    if not invocation:
        return 0
    ids, sought = array("q", prompt_ids), array("q", invocation)
    text, end = ids.tobytes(), len(ids) * ids.itemsize
    while (at := text.rfind(sought.tobytes(), 0, end)) >= 0:
        if at % ids.itemsize == 0:
            return at // ids.itemsize
        end = at + len(sought) * ids.itemsize - 1
    return None
