"""Checks that weights, read again, are those that were judged."""

import hashlib
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from loraplex.adapters.manifest import AdapterText
from loraplex.adapters.peft.config import PeftConfig
from loraplex.adapters.safetensors.file import WeightsFile
from loraplex.adapters.safetensors.floats import Raw

# By how many of the parts that few adapters have come before the weights: up to the last one that
# says something. So an adapter without any keeps the digest that it always had.
_VERSIONS = [f"loraplex adapter {number}".encode() for number in range(1, 7)]
_MIX = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


class ContentDigest:
    """sha256 over an adapter's config, its texts and its weights file.

    The texts are the default chat template, special tokens, ends of an answer, other templates,
    classes and added tokens. Each part but the weights comes with its length.
    """

    def __init__(self, config: PeftConfig, text: AdapterText) -> None:
        template, ends, classes, added = text
        tokens, named = (template.special_tokens, template.named) if template else ({}, {})
        default = (template.source or "") if template else ""
        parts = [msgspec.json.encode(config), default.encode()]
        seldom = (tokens, ends, named, classes, added)
        count = max((place for place, part in enumerate(seldom, 1) if part), default=0)
        parts += [msgspec.json.encode(part, order=_order(part)) for part in seldom[:count]]
        self._sha256 = hashlib.sha256(_VERSIONS[count])
        for part in parts:
            self._sha256.update(len(part).to_bytes(8, "little") + part)

    def update(self, piece: Raw) -> None:
        """Adds the next bytes of the weights file."""
        self._sha256.update(piece.data)

    def hexdigest(self) -> str:
        return self._sha256.hexdigest()


def _order(part: object) -> Literal["sorted"] | None:
    """Chooses the order of keys: the order of a table carries no meaning."""
    return "sorted" if isinstance(part, dict) else None


class Fingerprint:
    """A sum over pieces, quick to make. It detects what a disk has garbled, not what was forged."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, piece: Raw) -> None:
        """Adds the next piece. The same pieces in the same order make the same value."""
        words = len(piece) // 8
        total = int(np.add.reduce(piece[: 8 * words].view("<u8")))
        total += int.from_bytes(piece[8 * words :].tobytes(), "little")
        self.value = (self.value * _MIX + total + len(piece)) & _MASK


class Seal(NamedTuple):
    """Recognises weights whose digest this process has computed.

    identity: `WeightsFile.identity` when the digest was computed. fingerprint: the value of a
    `Fingerprint` of their LoRA tensors, in the file's order.
    """

    identity: tuple[int, ...]
    fingerprint: int


class ContentCheck(Protocol):
    """Sees what is read of a weights file, in the file's order."""

    def before(self, position: int) -> None:
        """Announces that the next piece begins at `position`."""
        ...

    def update(self, piece: Raw) -> None: ...

    def holds(self) -> bool:
        """Whether all that was read is as expected. Nothing may be read afterwards."""
        ...


class SealCheck:
    """Checks by the seal. The file must be the one that the seal was made of."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._found = Fingerprint()

    def before(self, position: int) -> None:
        pass

    def update(self, piece: Raw) -> None:
        self._found.update(piece)

    def holds(self) -> bool:
        return self._found.value == self._seal.fingerprint


class DigestCheck:
    """Checks by the digest of the whole file, and reads what nobody else reads."""

    def __init__(
        self,
        weights: WeightsFile,
        config: PeftConfig,
        text: AdapterText,
        digest: str,
    ) -> None:
        self._weights = weights
        self._expected = digest
        self._found = ContentDigest(config, text)
        self._position = 0

    def before(self, position: int) -> None:
        for piece in self._weights.pieces(self._position, position):
            self._found.update(piece)
        self._position = position

    def update(self, piece: Raw) -> None:
        self._found.update(piece)
        self._position += len(piece)

    def holds(self) -> bool:
        self.before(self._weights.nbytes)
        return self._found.hexdigest() == self._expected
