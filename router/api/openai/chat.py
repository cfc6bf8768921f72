"""OpenAI's `/v1/chat/completions`: request bodies and answers. Pure."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.chat.conversation import TemplateOptions, Verbosity
from loraplex.router.api.openai.calls import AnswerCall, CalledFunction, CallPart, CallWriter
from loraplex.router.api.openai.common import (
    ReasoningBody,
    ReasoningWish,
    adapter_of,
    options_of,
    reasoning_asked,
    sampling_of,
    typed_openai,
    with_shape,
)
from loraplex.router.api.openai.openai_formatter import (
    AnswerOptions,
    OpenAIFinish,
    OpenAIFormatter,
    PromptLogprobs,
    ReasoningSent,
    Usage,
    experts_of,
    listed,
    state_of,
    stopped,
)
from loraplex.router.api.request.body import agreed, decode_plain, require
from loraplex.router.api.request.chat_messages import (
    PIXELS,
    Message,
    check_pixels,
    to_template,
)
from loraplex.router.api.request.fields import BOUNDS, NonNegative, Positive
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import Elsewhere, without_refused
from loraplex.router.api.request.tool_fields import (
    FunctionCallChoice,
    NamedFunction,
    OfferedFunctions,
    OfferedTools,
    ToolChoice,
    custom_names,
    functions_of,
    shown_tools,
    tools_of,
    typed_choice,
)
from loraplex.router.api.wire import encode, finite, sse
from loraplex.router.call import (
    AnswerHead,
    ChoiceResult,
    GenerationCall,
    PromptInfo,
    TextEvent,
    TextToken,
)
from loraplex.router.tools.tools import Tools
from loraplex.server.protocol import PixelBounds

_BROKEN_CHARACTER = "�"


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """Message of the assistant in a whole answer. content: null with calls and no text.
    function_call: a call of the older `functions`. reasoning_content: the older name of
    `reasoning`.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a whole answer. stop_reason, matched_stop: the stop string or the token that
    ended it; the former is null of the model's own end. hidden_states: the state from which the
    last token was drawn, where it was asked for. routed_experts: as of a completion's choice.
    """

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: OpenAIFinish
    stop_reason: int | str | None
    matched_stop: int | str | None
    token_ids: list[int] | None
    hidden_states: list[float] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """A whole answer. From prompt_logprobs on: null unless they were asked for."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: None = None


class Delta(msgspec.Struct, frozen=True):
    """New part of a message in a stream. reasoning_content: the older name of `reasoning`.
    hidden_states: as of a whole answer's choice, in a chunk of their own behind the choice's end.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: None | UnsetType = UNSET
    tool_calls: list[CallPart] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None
    hidden_states: list[float] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice in a chunk of a stream. stop_reason, matched_stop, routed_experts: as of a whole
    answer's; before the end null, but the last is absent.
    """

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: OpenAIFinish | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream. prompt_token_ids: in a choice's first; null unless asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET


class ChatFormatter(OpenAIFormatter):
    """Writes answers of `/v1/chat/completions`."""

    def __init__(self, head: AnswerHead, options: AnswerOptions) -> None:
        super().__init__(head, options, "chatcmpl")
        self._calling: set[int] = set()
        self._reasoning: dict[int, str] = {}
        self._calls = CallWriter(options.custom)

    def prompt(self, info: PromptInfo) -> bytes:
        """Writes the beginning of a prompt's choices: each begins with the role."""
        self._prompts.append(info)
        choices, ids = range(self._options.n), self._options.ids(info.token_ids)
        none = self._options.ids(())
        role = Delta(role="assistant", content="", refusal=None)
        chunks = [self._chunk(ChunkChoice(i, role, token_ids=none), ids) for i in choices]
        if self._options.echoed:
            echoed = Delta(content=self._options.echoed)
            chunks += [self._chunk(ChunkChoice(i, echoed, token_ids=none)) for i in choices]
        return b"".join(chunks)

    def chunk(self, event: TextEvent) -> bytes:
        """Writes the chunks for the next piece of a choice. Raises RequestError (incomplete)."""
        if event.vector:
            return self._chunk(ChunkChoice(event.choice, Delta(hidden_states=state_of(event))))
        self._num_tokens += event.num_tokens
        self._num_reasoning += event.num_reasoning
        logprobs = self._logprobs(event.tokens)
        ids, data = self._options.ids(event.token_ids), b""
        reasoning = self._reasoning_now(event)
        parts = self._calls.parts(event)
        if event.calls:
            self._calling.add(event.choice)
        has_text = event.text or reasoning or parts
        if has_text or ids or (logprobs is not None and logprobs.content):
            content = UNSET if has_text and not event.text else event.text
            delta = self._with_call(
                Delta(
                    content=content,
                    reasoning=reasoning or None,
                    reasoning_content=reasoning or None,
                ),
                parts.pop(0) if parts else None,
            )
            data = self._chunk(ChunkChoice(event.choice, delta, logprobs, token_ids=ids))
        none = self._options.ids(())
        for part in parts:  # one in a chunk: clients read the first one alone
            delta = self._with_call(Delta(), part)
            data += self._chunk(ChunkChoice(event.choice, delta, token_ids=none))
        if event.finish is not None:
            reason = self._finish_reason(event.finish, event.choice in self._calling)
            ended = (*stopped(event), none, experts_of(event))
            data += self._chunk(ChunkChoice(event.choice, Delta(), None, reason, *ended))
        return data

    def _with_call(self, delta: Delta, part: CallPart | None) -> Delta:
        if part is None:
            return delta
        if self._options.older_calls and part.function:
            return msgspec.structs.replace(delta, function_call=part.function)
        return msgspec.structs.replace(delta, tool_calls=[part])

    def _reasoning_now(self, event: TextEvent) -> str:
        """The reasoning that the event's chunk carries."""
        sent = self._options.reasoning
        if sent == "streamed":
            return event.reasoning
        if sent == "never":
            return ""
        kept = self._reasoning.pop(event.choice, "") + event.reasoning
        if kept and not (event.text.strip() or event.calls or event.finish):
            self._reasoning[event.choice] = kept
            return ""
        return kept

    def whole(self, results: Sequence[ChoiceResult], prompts: Sequence[PromptInfo]) -> bytes:
        """Writes the whole answer at once. Raises RequestError (incomplete)."""
        choices = [
            ChatChoice(
                result.prompt_index * self._options.n + result.choice,
                self._message(result),
                self._logprobs(result.tokens),
                self._finish_reason(result.finish, bool(result.calls)),
                *stopped(result),
                self._options.ids(result.token_ids),
                state_of(result),
                experts_of(result),
            )
            for result in results
        ]
        answer = ChatCompletion(
            self._id,
            "chat.completion",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            self._usage_of(results, prompts),
            self._prompt_logprobs(prompts[0]) if len(prompts) == 1 else None,
            self._options.ids(prompts[0].token_ids) if len(prompts) == 1 else None,
        )
        return encode(answer)

    def _message(self, result: ChoiceResult) -> AnswerMessage:
        text = self._options.echoed + result.text
        hides = self._options.reasoning == "never"
        reasoning = None if hides or not result.reasoning else result.reasoning
        calls = [self._calls.whole(call) for call in result.calls]
        older = self._options.older_calls
        return AnswerMessage(
            "assistant",
            None if calls and not text else text,
            tool_calls=UNSET if older or not calls else calls,
            function_call=calls[0].function if older and calls else UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
        )

    def _counts_alone(self, usage: Usage) -> ChatChunk:
        return self._chunk_of([], usage)

    def _chunk(
        self, choice: ChunkChoice, prompt_ids: list[int] | None | UnsetType = UNSET
    ) -> bytes:
        return sse(self._chunk_of([choice], self._usage_so_far(), prompt_ids))

    def _chunk_of(
        self,
        choices: list[ChunkChoice],
        usage: Usage | None | UnsetType,
        prompt_ids: list[int] | None | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._head.created,
            self._head.model,
            self._fingerprint,
            choices,
            usage,
            prompt_ids,
        )

    def _logprobs(self, tokens: Sequence[TextToken]) -> ChoiceLogprobs | None:
        if self._options.logprobs is None:
            return None
        # Tokens that are part of the message: special ones are where they are written.
        every = self._options.tokens_as_ids
        return ChoiceLogprobs([self._token(t) for t in tokens if every or not t.special or t.text])

    def _token(self, token: TextToken) -> ChatTokenLogprob:
        name = self._options.name
        return ChatTokenLogprob(
            name(token.token_id, token.token),
            finite(token.logprob),
            list(token.raw) if token.raw is not None else bytes_of(token.token),
            [
                TopLogprob(name(top.token_id, top.text), finite(top.logprob), bytes_of(top.text))
                for top in listed(token) or token.top
            ],
        )


def bytes_of(text: str) -> list[int] | None:
    """A token's bytes; null for part of a character, whose bytes are not known here."""
    return None if _BROKEN_CHARACTER in text else list(text.encode())


class ImageSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fewest and the most pixels, as transformers' processors of Qwen call them."""

    shortest_edge: Positive | None = None
    longest_edge: Positive | None = None


class ImageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the model's processor of images: pixels of a resized image."""

    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    size: ImageSize | None = None


class ChatBody(ReasoningBody, frozen=True, kw_only=True):
    """Body of a request to `/v1/chat/completions`. max_tokens: absent = all that fits.

    Extensions: echo: the answer begins with the last message, if that is the assistant's.
    add_generation_prompt: begin the assistant's answer; true unless the final message is continued.
    continue_final_message: go on within it. chat_template: a name of the model's template list.
    chat_template_kwargs: further variables of the template. add_special_tokens: around the rendered
    text, for a template that does not write them. include_reasoning (vLLM's): answers contain their
    reasoning. enable_thinking, thinking_budget, thinking, reasoning: other servers' names of such
    things. separate_reasoning (SGLang's): apart from the text. stream_reasoning (SGLang's): as
    it comes, else at once when it is over. thinking_token_budget (vLLM's): tokens of the reasoning
    at most; -1 = any number. mm_processor_kwargs (vLLM's): sizes of all images that say none.
    """

    messages: list[Message]
    max_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegative | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    tools: OfferedTools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: OfferedFunctions | None = None
    function_call: FunctionCallChoice | None = None
    verbosity: Verbosity | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    mm_processor_kwargs: ImageOptions | None = None


class BatchChatBody(ChatBody, frozen=True, kw_only=True):
    """Body of vLLM's request for several chats at once. messages: conversations, each with its own
    choice. Without streams, tools, echo and several answers of one.
    """

    messages: list[list[Message]]  # type: ignore[assignment]  # where a chat has one


# Fields that one conversation alone may use, by the values that ask for nothing.
OF_ONE = {
    "stream": Elsewhere((False,), "answers of several conversations are whole"),
    "n": Elsewhere((1,), "each conversation has one choice"),
    **dict.fromkeys(
        ("tools", "functions", "echo"), Elsewhere((False, []), "`/v1/chat/completions` has it")
    ),
}


def parse_batch(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads a request with several conversations. Raises RequestError."""
    plain = without_refused(decode_plain(body), OF_ONE)
    request = typed_openai(plain, BatchChatBody, limits)
    most, got = limits.max_prompts, len(request.messages)
    require(0 < got <= most, f"expected 1 to {most} conversations, got {got}", "messages")
    return request_of(request, limits, bearer)


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Reads the body of a chat. Raises RequestError."""
    plain = decode_plain(body)
    if "tool_choice" in plain:
        plain |= {"tool_choice": typed_choice(plain["tool_choice"])}
    return request_of(typed_openai(plain, ChatBody, limits), limits, bearer)


def request_of(request: ChatBody, limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Makes the call of the model that a chat asks for. Raises RequestError."""
    first, *further = _conversations(request, limits)
    n, reasoning = request.n or 1, reasoning_asked(request)
    sampling = sampling_of(
        request,
        limits,
        max_tokens=request.max_tokens,
        logprobs=_logprobs_asked(request),
        prompt_logprobs=request.prompt_logprobs,
    )
    tools = _tools(request)
    ignores = "ignore_eos" if request.ignore_eos else "ignore_eos_token"
    has_end = tools is not None and tools.is_held
    require(not (has_end and sampling.ignore_eos), "calls of tools have an end", ignores)
    call = GenerationCall(
        api="chat",
        prompts=(),
        messages=first,
        further=tuple(further),
        adapter=adapter_of(request, limits, bearer),
        sampling=sampling,
        max_tokens=request.max_tokens,
        n=n,
        best_of=n,
        add_special_tokens=bool(request.add_special_tokens),
        template=_template_options(request, tools, reasoning),
        tools=tools,
        divides_reasoning=request.separate_reasoning is not False,
        thinking_budget=None if reasoning.budget == -1 else reasoning.budget,
        unbound=() if tools is None else tools.unheld,
    )
    call = with_shape(call, request, limits)
    options = msgspec.structs.replace(
        options_of(request, call),
        echoed=_text_of(request.messages[-1]) if request.echo else "",
        reasoning=_reasoning_sent(request, reasoning),
        named_call=tools is not None and tools.named,
        older_calls=bool(request.functions),
        custom=custom_names(request.tools),
    )
    return ApiRequest(call, ChatFormatter, options)


def _conversations(request: ChatBody, limits: ApiLimits) -> list[list[dict[str, Any]]]:
    """Returns the conversations of a request as templates take them. Raises RequestError."""
    given = [("messages", request.messages)]
    if isinstance(request, BatchChatBody):
        given = [(f"messages[{i}]", messages) for i, messages in enumerate(request.messages)]
    for where, messages in given:
        BOUNDS["messages"].check(messages, where, limits)
    pixels = _pixels_of(request)
    return [to_template(messages, where, pixels) for where, messages in given]


def _tools(request: ChatBody) -> Tools | None:
    """Finds the tools that the model may call; None = none. Raises RequestError."""
    if not request.functions:
        is_named = isinstance(request.function_call, NamedFunction)
        require(not is_named, "needs `functions`", "function_call")
        return tools_of(request.tools, request.tool_choice, request.parallel_tool_calls)
    require(not request.tools, "goes with no `functions`", "tools")
    asks = request.tool_choice not in (None, "auto", "none")
    require(not asks, "needs `tools`", "tool_choice")
    return functions_of(request.functions, request.function_call)


def _pixels_of(request: ChatBody) -> PixelBounds:
    """Returns the bounds of pictures that say none themselves. Raises RequestError."""
    name, given = "mm_processor_kwargs", request.mm_processor_kwargs or ImageOptions()
    size = given.size or ImageSize()
    edges = size.shortest_edge, size.longest_edge
    least, most = (
        agreed({f"{name}.size": edge, f"{name}.{bound}": getattr(given, bound)}) or 0
        for bound, edge in zip(PIXELS, edges, strict=True)
    )
    check_pixels((least, most), name)
    return least, most


def _reasoning_sent(request: ChatBody, asked: ReasoningWish) -> ReasoningSent:
    if asked.is_included is False:
        return "never"
    return "whole" if request.stream_reasoning is False else "streamed"


def _text_of(last: Message) -> str:
    """The text that vLLM's `echo` puts before the answer: the last message, if the assistant's."""
    if last.role != "assistant":
        return ""
    content = last.content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _template_options(
    request: ChatBody, tools: Tools | None, reasoning: ReasoningWish
) -> TemplateOptions:
    """Collects what a request says about its template's rendering. Raises RequestError."""
    continues = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    message = "must be false beside `continue_final_message`"
    require(not (continues and begins), message, "add_generation_prompt")
    older = [{"type": "function", "function": function} for function in request.functions or ()]
    shown = request.tools or older
    return TemplateOptions(
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        documents=request.documents,
        tools=None if tools is None else shown_tools(shown, tools),
        in_loop=bool(shown),
        effort=reasoning.effort,
        thinks=reasoning.thinks,
        verbosity=request.verbosity,
        template=request.chat_template,
        variables=request.chat_template_kwargs or {},
    )


def _logprobs_asked(request: ChatBody) -> int | None:
    top = request.top_logprobs
    require(not top or request.logprobs, "needs `logprobs` to be true", "top_logprobs")
    return (top or 0) if request.logprobs else None
