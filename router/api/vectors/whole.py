"""What answers about prompts have in common: they are never streamed. Pure."""

from collections.abc import Sequence

import msgspec

from router.api.request.formatter import Formatter
from router.call import PromptInfo, RequestError, TextEvent
from server.protocol import SamplingParams

# Of a call whose prompts are read, and nothing more.
READ_ALONE = SamplingParams(temperature=0.0, max_tokens=0)
# Texts of one request, as OpenAI has it.
MAX_INPUTS = 2048


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


class VectorUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


def usage_of(prompts: Sequence[PromptInfo]) -> VectorUsage:
    tokens = sum(prompt.num_tokens for prompt in prompts)
    return VectorUsage(tokens, tokens)
