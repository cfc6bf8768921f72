"""Token bytes to text, as they come: never half a character, constant work a token. Pure.

Every token stands for fixed bytes (a byte-level or byte-fallback token for some of a character's),
so text is their concatenation, decoded incrementally; an invalid sequence becomes U+FFFD.
"""

import codecs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence of tokens, given each token's bytes."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _Utf8Decoder("replace")

    def push(self, data: bytes) -> str:
        """The text that `data` completes; at most 3 bytes are held back."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an unfinished character at the end becomes. Nothing may be pushed after it."""
        return self._decoder.decode(b"", True)
