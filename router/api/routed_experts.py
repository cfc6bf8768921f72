"""Experts of an answer's tokens, as they are reported: joined, and written. Pure."""

from base64 import b64encode

from loraplex.server.protocol import RoutedExperts, RoutingForm

# Of numpy's format, version 1.0; its header ends where a multiple of so many bytes does.
_NPY, _ALIGNED = b"\x93NUMPY\x01\x00", 64


class RoutedTokens:
    """Experts of a sequence's tokens from the first one on, as far as they have come. Tokens that
    are computed again, on another worker, keep those that came first.
    """

    def __init__(self) -> None:
        self._form: RoutingForm | None = None
        self._chosen = bytearray()

    def add(self, routed: RoutedExperts) -> None:
        """Take what an event reports. Raises ValueError where something is missing before it."""
        known = len(self._chosen) // routed.form.nbytes - routed.start
        if known < 0:
            raise ValueError(f"experts of {-known} tokens before {routed.start} are missing")
        self._form = routed.form
        self._chosen += routed.chosen[known * routed.form.nbytes :]

    def first(self, tokens: int) -> RoutedExperts | None:
        """Return those of the first so many tokens; None where none came."""
        if self._form is None:
            return None
        return RoutedExperts(self._form, 0, bytes(self._chosen[: tokens * self._form.nbytes]))


def as_npy(routed: RoutedExperts) -> str:
    """Write numpy's file in base64: `[tokens, layers, top_k]`, uint8 or uint16, as vLLM does."""
    form = routed.form
    kind, shape = f"<u{form.itemsize}" if form.itemsize > 1 else "|u1", (routed.end, form.layers)
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {(*shape, form.top_k)}, }}"
    size = len(_NPY) + 2 + len(head) + 1
    padded = (head + " " * (-size % _ALIGNED) + "\n").encode()
    return b64encode(_NPY + len(padded).to_bytes(2, "little") + padded + routed.chosen).decode()


def as_int32(routed: RoutedExperts, start: int = 0) -> str:
    """Write the numbers alone in base64, int32, as SGLang does. start: of the first token."""
    form = routed.form
    numbers = memoryview(routed.chosen)[start * form.nbytes :]
    wide = bytearray(4 * (len(numbers) // form.itemsize))
    for place in range(form.itemsize):
        wide[place::4] = numbers[place :: form.itemsize]
    return b64encode(wide).decode()
