"""What answers about prompts have in common: they are never streamed. Pure."""

import base64
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from loraplex.router.api.request.formatter import Formatter
from loraplex.router.call import AnswerHead, PromptInfo, RequestError, TextEvent
from loraplex.server.protocol import SamplingParams

# Of a call whose prompts are read, and nothing more.
READ_ALONE = SamplingParams(temperature=0.0, max_tokens=0)
# Texts of one request, as OpenAI has it.
MAX_INPUTS = 2048
Encoding = Literal["float", "base64"]


class WholeFormatter(Formatter):
    """Of answers that are sent when they are complete."""

    def prompt(self, info: PromptInfo) -> bytes:
        return b""

    def chunk(self, event: TextEvent) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def error(self, error: RequestError) -> bytes:
        return b""


class WrittenAs(msgspec.Struct, frozen=True):
    """How a request wants its answer. id: the caller's own, in place of the request's."""

    id: str | None = None
    encoding: Encoding = "float"

    def id_of(self, prefix: str, head: AnswerHead) -> str:
        return f"{prefix}-{self.id or head.request_id}"

    def vector(self, numbers: Sequence[float]) -> Sequence[float] | str:
        return numbers if self.encoding == "float" else packed(numbers)


def packed(numbers: Sequence[float]) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


class VectorUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


def usage_of(prompts: Sequence[PromptInfo]) -> VectorUsage:
    tokens = sum(prompt.num_tokens for prompt in prompts)
    return VectorUsage(tokens, tokens)
