"""Shared by the routes that read texts: fields and their checks, and whole answers. Pure."""

import base64
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from loraplex.router.api.openai.chat import ChatBody
from loraplex.router.api.openai.chat import request_of as chat_request
from loraplex.router.api.openai.common import HARMLESS, Truncation, adapter_by
from loraplex.router.api.request.body import only_one_of, require
from loraplex.router.api.request.chat_messages import Message
from loraplex.router.api.request.fields import (
    AdapterFields,
    CacheSalt,
    NonNegative,
    Priority,
    RequestId,
    prompts_of,
    salt_of,
)
from loraplex.router.api.request.formatter import ApiLimits, Formatter
from loraplex.router.api.request.known_elsewhere import typed_by_aliases, unsupported
from loraplex.router.call import (
    AnswerHead,
    Api,
    GenerationCall,
    PromptInfo,
    RequestError,
    TextEvent,
    VectorCall,
)
from loraplex.server.protocol import SamplingParams

# The sampling of a call that only reads its prompts.
READ_ALONE = SamplingParams(temperature=0.0, max_tokens=0)
# Texts of one request, as OpenAI has it.
MAX_INPUTS = 2048
Encoding = Literal["float", "base64"]


class WholeFormatter(Formatter):
    """Writes answers that are sent when they are complete. options: as the subclass reads them."""

    def __init__(self, head: AnswerHead, options: Any) -> None:
        self._head = head
        self._options = options

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
    """Packs numbers as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


class VectorUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


def usage_of(prompts: Sequence[PromptInfo]) -> VectorUsage:
    tokens = sum(prompt.num_tokens for prompt in prompts)
    return VectorUsage(tokens, tokens)


class ReadBody(AdapterFields, frozen=True, kw_only=True):
    """Fields of every request that has texts read and none written. model: an adapter's alias or
    reference, or the base's name; absent = the base.

    truncate_prompt_tokens: texts are cut to so many tokens, -1 = to as many as fit. padding: causal
    models read none. request_id: of the answer's id.
    """

    harmless: ClassVar[frozenset[str]] = HARMLESS

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    lora_path: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    padding: Literal["do_not_pad"] | None = None
    request_id: RequestId | None = None


# Other servers' names of what is `input` here.
_SAID_ELSEWHERE = ("inputs", "text", "texts", "input_ids")
R = TypeVar("R", bound=AdapterFields)
READ = ("input", "messages")


class InputBody(ReadBody, frozen=True, kw_only=True):
    """Fields of requests whose texts may come as a chat. input: a text, a list of texts, token ids,
    or a list of lists of token ids. messages: in its place; as a chat, but without the beginning
    of an answer and special tokens around the text unless they are asked for.

    use_activation: of vectors, whether they get length 1; of classes, as of `ScoredBody`.
    """

    input: str | list[str | NonNegative | list[NonNegative]] | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    use_activation: bool | None = None


class ScoredBody(ReadBody, frozen=True, kw_only=True):
    """Fields of requests for scores. use_activation: false = scores as the model gives them, not as
    probabilities. activation, softmax: its older names.
    """

    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None

    @property
    def is_raw(self) -> bool:
        return False in (self.use_activation, self.activation, self.softmax)


def read_body(plain: dict[str, Any], kind: type[R]) -> R:
    """Reads a body. Unknown fields must be harmless or ask for nothing. Raises RequestError."""
    known = kind.__struct_fields__
    for name in _SAID_ELSEWHERE:
        if "input" in known and name not in known and plain.get(name):
            raise unsupported(name, "use `input`")
    require(isinstance(plain.get("metadata"), dict | None), "expected an object", "metadata")
    return typed_by_aliases(plain, kind)


def input_call(
    api: Api, request: InputBody, vector: VectorCall, limits: ApiLimits, bearer: str | None
) -> GenerationCall:
    """Makes the call of a body with `input` or `messages`. Raises RequestError."""
    only_one_of(msgspec.structs.asdict(request), READ)
    if request.input is not None:
        prompts = prompts_of(request.input, "input", MAX_INPUTS)
        return call_of(api, request, prompts, vector, limits, bearer)
    same = {name: getattr(request, name) for name in _SAME}
    chat = chat_request(
        ChatBody(**same, add_generation_prompt=bool(request.add_generation_prompt)), limits, None
    ).call
    if vector.prompt_name is None and vector.prompt is None:
        vector = msgspec.structs.replace(vector, prompt="")
    return msgspec.structs.replace(
        call_of(api, request, (), vector, limits, bearer),
        messages=chat.messages,
        template=chat.template,
        add_special_tokens=chat.add_special_tokens,
    )


_SAME = (
    *("messages", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs"),
)


def call_of(
    api: Api,
    request: ReadBody,
    prompts: tuple[str | list[int], ...],
    vector: VectorCall,
    limits: ApiLimits,
    bearer: str | None,
) -> GenerationCall:
    """Makes the call of the model that reads texts and writes none. Raises RequestError."""
    cut = request.truncate_prompt_tokens
    require(cut != 0, "expected at least 1, or -1 for all that fit", "truncate_prompt_tokens")
    require(
        cut is not None or request.truncation_side is None,
        "needs `truncate_prompt_tokens`",
        "truncation_side",
    )
    return GenerationCall(
        api=api,
        prompts=prompts,
        messages=None,
        adapter=adapter_by(request, request.model, request.lora_path, limits, bearer),
        sampling=READ_ALONE,
        max_tokens=0,
        user=request.user,
        add_special_tokens=request.add_special_tokens is not False,
        truncate=cut,
        truncate_keeps="last" if request.truncation_side == "left" else "first",
        priority=request.priority or 0,
        cache_salt=salt_of(request.cache_salt),
        vector=vector,
    )
