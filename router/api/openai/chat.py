"""OpenAI's `/v1/chat/completions`: request bodies and answers. Pure."""

from typing import Any

import msgspec

from loraplex.adapters.chat.conversation import ReasoningEffort, TemplateOptions, Verbosity
from loraplex.router.api.openai.answer import ReasoningSent
from loraplex.router.api.openai.chat_answer import ChatFormatter
from loraplex.router.api.openai.common import (
    OpenAIBody,
    adapter_of,
    decode_openai,
    options_of,
    sampling_of,
    typed_openai,
)
from loraplex.router.api.openai.shape import with_shape
from loraplex.router.api.request.body import decode_plain, require
from loraplex.router.api.request.chat_messages import Message, to_template
from loraplex.router.api.request.fields import NonNegative, Positive, ThinkingTokens
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.known_elsewhere import Elsewhere, check_refused
from loraplex.router.api.request.tool_fields import OfferedTools, ToolChoice, for_template, tools_of
from loraplex.router.call import GenerationCall
from loraplex.router.tools.tools import Tools


class ChatBody(OpenAIBody, frozen=True, kw_only=True):
    """max_tokens: absent = all that fits.

    Extensions: echo: the answer begins with the last message, if that is the assistant's.
    add_generation_prompt: begin the assistant's answer; true unless the final message is continued.
    continue_final_message: go on within it. chat_template: a name of the model's template list.
    chat_template_kwargs: further variables of the template. add_special_tokens: around the rendered
    text, for a template that does not write them. include_reasoning (vLLM's): answers contain their
    reasoning. separate_reasoning (SGLang's): apart from the text. stream_reasoning (SGLang's): as
    it comes, else at once when it is over. thinking_token_budget (vLLM's): tokens of the reasoning
    at most; -1 = any number.
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
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    thinking_token_budget: ThinkingTokens | None = None


class BatchChatBody(ChatBody, frozen=True, kw_only=True):
    """vLLM's. messages: conversations, each with its own choice. Without streams, tools, echo and
    several answers of one."""

    messages: list[list[Message]]  # type: ignore[assignment]  # where a chat has one


# What one conversation alone has, by what asks for nothing beside null.
OF_ONE = {
    "stream": Elsewhere((False,), "answers of several conversations are whole"),
    "n": Elsewhere((1,), "each conversation has one choice"),
    **dict.fromkeys(("tools", "echo"), Elsewhere((False, []), "`/v1/chat/completions` has it")),
}


def parse_batch(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Raises RequestError."""
    plain = decode_plain(body)
    check_refused(plain, OF_ONE)
    request = typed_openai(plain, BatchChatBody, limits)
    most, got = limits.max_prompts, len(request.messages)
    require(0 < got <= most, f"expected 1 to {most} conversations, got {got}", "messages")
    return request_of(request, limits, bearer)


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Raises RequestError."""
    return request_of(decode_openai(body, ChatBody, limits), limits, bearer)


def request_of(request: ChatBody, limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Raises RequestError."""
    first, *further = _conversations(request, limits)
    n, budget = request.n or 1, request.thinking_token_budget
    sampling = sampling_of(
        request,
        limits,
        max_tokens=request.max_tokens,
        logprobs=_logprobs_asked(request, limits),
        prompt_logprobs=request.prompt_logprobs,
    )
    tools = tools_of(request.tools, request.tool_choice, request.parallel_tool_calls)
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
        template=_template_options(request, tools),
        tools=tools,
        divides_reasoning=request.separate_reasoning is not False,
        thinking_budget=None if budget == -1 else budget,
    )
    call = with_shape(call, request, limits)
    options = msgspec.structs.replace(
        options_of(request, call),
        echoed=_text_of(request.messages[-1]) if request.echo else "",
        reasoning=_reasoning_sent(request),
        named_call=tools is not None and tools.named,
    )
    return ApiRequest(call, ChatFormatter, options)


def _conversations(request: ChatBody, limits: ApiLimits) -> list[list[dict[str, Any]]]:
    """As templates take them. Raises RequestError."""
    given = [("messages", request.messages)]
    if isinstance(request, BatchChatBody):
        given = [(f"messages[{i}]", messages) for i, messages in enumerate(request.messages)]
    most = limits.max_messages
    for where, messages in given:
        got = len(messages)
        require(0 < got <= most, f"expected 1 to {most} messages, got {got}", where)
    return [to_template(messages, where) for where, messages in given]


def _reasoning_sent(request: ChatBody) -> ReasoningSent:
    if request.include_reasoning is False:
        return "never"
    return "whole" if request.stream_reasoning is False else "streamed"


def _text_of(last: Message) -> str:
    """What vLLM's `echo` puts before the answer: the last message, if the assistant began it."""
    if last.role != "assistant":
        return ""
    content = last.content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


def _template_options(request: ChatBody, tools: Tools | None) -> TemplateOptions:
    """Raises RequestError."""
    continues = bool(request.continue_final_message)
    begins = request.add_generation_prompt
    message = "must be false beside `continue_final_message`"
    require(not (continues and begins), message, "add_generation_prompt")
    return TemplateOptions(
        add_generation_prompt=not continues if begins is None else begins,
        continue_final_message=continues,
        documents=request.documents,
        tools=None if tools is None else for_template(tools),
        in_loop=bool(request.tools),
        effort=request.reasoning_effort,
        verbosity=request.verbosity,
        template=request.chat_template,
        variables=request.chat_template_kwargs or {},
    )


def _logprobs_asked(request: ChatBody, limits: ApiLimits) -> int | None:
    top = request.top_logprobs
    require(not top or request.logprobs, "needs `logprobs` to be true", "top_logprobs")
    most = limits.max_logprobs
    require((top or 0) <= most, f"expected at most {most}, got {top}", "top_logprobs")
    return (top or 0) if request.logprobs else None
