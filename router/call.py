"""A generation request of any API, and its results. Pure.

`loraplex.router.api.*` parses a body into a GenerationCall and formats TextEvents and
ChoiceResults; dispatch and text modules do the rest and know no API.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from loraplex.adapters.chat.conversation import TemplateOptions
from loraplex.adapters.errors import Violation
from loraplex.adapters.merge.recipe import MergeStrategy, SignMethod
from loraplex.adapters.ref import AdapterRef
from loraplex.router.parts.parts import CallDelta, ToolCall
from loraplex.router.policy.prices import Receipt
from loraplex.router.shape.shape import Shape
from loraplex.router.tools.tools import Tools
from loraplex.server.protocol import UNBOUNDED, PixelBounds, RoutedExperts, SamplingParams

Api = Literal[
    "lorax",
    "completions",
    "tokens",  # vLLM's tokens in, tokens out
    "chat",
    "responses",
    "messages",
    "sglang",
    "lmdeploy",
    "embeddings",  # OpenAI's
    "embed",  # LoRAX's and TEI's
    "classify",
    "score",
    "rerank",
    "cohere_embed",
]
# The field that names the adapter, where it is not `model`.
_ADAPTER_FIELDS: dict[Api, str] = {
    "lorax": "adapter_id",
    "sglang": "lora_path",
    "lmdeploy": "lora_path",
    "embed": "adapter_id",
}
# What is left of a prompt that is cut.
PromptEnd = Literal["first", "last"]
# What clients made for servers of one model send as `model` when their user gave none.
BASE_PLACEHOLDERS = ("", "dummy", "tgi")
# eos: the model ended; stop: a stop string or stop token id of the caller's.
FinishReason = Literal["eos", "stop", "length", "abort", "error"]
# Why a request is not answered; `loraplex.router.api.errors` says what each API makes of it.
Cause = Literal[
    "invalid",  # malformed, or a value that cannot be
    "unsupported",  # understood, and not served
    "unknown_parameter",  # a field that nobody knows
    "context_length",  # prompt and output do not fit the model
    "invalid_image",  # a picture that cannot be read, or fetched
    "template_error",  # the chat template cannot render these messages
    "unauthorized",  # no key, or a wrong one
    "forbidden",  # this caller may not
    "adapter_not_found",
    "key_not_found",
    "file_not_found",
    "batch_not_found",
    "response_not_found",
    "route_not_found",
    "method_not_allowed",
    "body_timeout",  # the body did not arrive in time
    "conflict",  # a lifecycle operation contradicts another
    "gone",  # removed
    "too_large",  # the body, in bytes
    "media_type",  # not JSON, not UTF-8, or compressed
    "adapter_invalid",
    "adapter_too_large",
    "overloaded",  # a queue is full
    "rate_limited",  # a quota is used up
    "unavailable",  # nothing can serve it now; a retry may help
    "not_served",  # not switched on, or what it needs cannot run here; a retry does not help
    "deadline",
    "incomplete",  # the answer broke off
    "idempotency_conflict",  # a request with this key runs, or has run
    "idempotency_mismatch",  # a request with this key had another body
    "quarantined",  # it killed the workers that ran it
    "internal",
]


def adapter_field(api: Api) -> str:
    return _ADAPTER_FIELDS.get(api, "model")


# Of every answer, also of an error once it is known which content it concerns.
DIGEST_HEADER = "x-loraplex-adapter-digest"
UNBOUND_HEADER = "x-loraplex-unbound"
# Of an answer whose request brought a scale.
SCALE_HEADER = "x-loraplex-adapter-scale"


class Secret(str):
    """A credential. It never shows in a repr or a log line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(…)"


class AdapterChoice(msgspec.Struct, frozen=True):
    """The adapter that a caller named, in the caller's words, and the credential for it.

    tenant: the caller's, whose own names come first. scale: multiplies what the adapter adds. base:
    the name of the base that the caller named with it; "" = none, the adapter's own.
    """

    adapter_id: str
    ref: AdapterRef
    token: Secret | None = None
    tenant: str = ""
    scale: float = 1.0
    base: str = ""

    def asked_by(self, tenant: str, base: str = "") -> "AdapterChoice":
        return msgspec.structs.replace(self, tenant=tenant, base=base)

    @property
    def source(self) -> str:
        return self.ref.source


class MergedChoice(msgspec.Struct, frozen=True):
    """Adapters that the caller wants merged. weights: parallel to members. See MergeRecipe."""

    members: tuple[AdapterChoice, ...]
    weights: tuple[float, ...]
    strategy: MergeStrategy
    density: float
    majority_sign_method: SignMethod

    def asked_by(self, tenant: str, base: str = "") -> "MergedChoice":
        members = tuple(member.asked_by(tenant, base) for member in self.members)
        return msgspec.structs.replace(self, members=members)

    @property
    def adapter_id(self) -> str:
        return ",".join(member.adapter_id for member in self.members)

    @property
    def source(self) -> str:
        return ",".join(dict.fromkeys(member.source for member in self.members))


class RequestError(Exception):
    """A request ends without an answer; its caller gets the reason.

    param: the field at fault, as the caller spelled it. retry_after_s: when a retry may help.
    headers: of the answer, beside those that every error has. details: for programs, where errors
    of the API have room for them.
    """

    def __init__(
        self,
        cause: Cause,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        violations: tuple[Violation, ...] = (),
        headers: dict[str, str] | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.cause: Cause = cause
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.violations = violations
        self.headers = headers or {}
        self.details = details

    def spelled(self, names: Mapping[str, str]) -> "RequestError":
        """The same error, where the route has another name for the field, or for what holds it."""
        param = self.param or ""
        for name, own in names.items():
            if f"{param}.".startswith(f"{name}."):
                spelled = own + param[len(name) :]
                message = self.message.replace(f"`{param}`", f"`{spelled}`")
                return RequestError(self.cause, message, param=spelled)
        return self


# A vector of a text; a number for each class; how well a document fits a query.
VectorUse = Literal["vector", "classes", "fit"]


class VectorCall(msgspec.Struct, frozen=True):
    """Vectors or scores that a request wants in place of answers.

    normalises: to length 1; None = as the model's files say. dimensions: only so many of a vector's
    numbers, the first; None = all. prompt_name, prompt: what is put before each text, by the name
    that the model's files give it or as it is; both None = as the files say. prompt_names: the
    first of these that the files have; nothing where they have none. queries: of `fit`, one for
    each prompt, which are the documents. instruction: what the fit is about; None = as the model's
    files say. max_document_tokens: documents are cut to so many. is_raw: scores as the model gives
    them, not as probabilities.
    """

    normalises: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    prompt_names: tuple[str, ...] = ()
    use: VectorUse = "vector"
    queries: tuple[str, ...] = ()
    instruction: str | None = None
    max_document_tokens: int | None = None
    is_raw: bool = False


class GivenPicture(msgspec.Struct, frozen=True):
    """A picture of a request. url: its data, or where it is. where: its place in the body.
    file_id: of an uploaded file, in place of the URL. pixels: as of `PictureSpan`.
    """

    url: str
    where: str
    file_id: str | None = None
    pixels: PixelBounds = UNBOUNDED


class GenerationCall(msgspec.Struct, frozen=True):
    """One API request, validated as far as is possible without the model.

    prompts: texts or token ids; exactly one for chat (then `messages` is set and prompts is empty).
    further: conversations behind `messages`, each a prompt of its own. pictures: of each of the
    prompts, whose places it has; empty where none has any.
    adapter: None = the base. sampling.max_tokens is not yet resolved: see max_tokens.
    max_tokens: None = all that fits. n: choices to return a prompt; best_of >= n: to generate.
    stop: stop strings. stop_regex: patterns that end the answer like them. include_stop: keep both
    in the text (LoRAX does, OpenAI does not).
    skip_special_tokens: leave special tokens out of the text. spaces_between_special_tokens: as in
    vLLM; without effect where they are left out.
    truncate: keep so many prompt tokens alone, the first or the last (truncate_keeps); -1 = as many
    as fit.
    rids: the caller's own ids of the request, by which it may be aborted.
    template: how messages are rendered.
    priority: how far behind the caller's own it asks to stand in the queue.
    cache_salt: shares cached prefixes with its like alone; "" = with its tenant's.
    drafts: whether its answer may be drafted.
    shape: the form that the answer must have; None = any. tools: what the model may call.
    divides_reasoning: what the model reasons is no part of the text. thinking_budget: tokens that
    it may have; None = any number.
    lists_all: tokens that a stop string has taken out of the text have logprobs, too.
    bad_words: texts that must not occur; sampling.bad_words has their ids once the model is known.
    vector: nothing is generated, and that is wanted of each prompt. last_states: each answer is
    followed by the hidden state from which its last token was drawn. routed_experts: those of each
    token are reported.
    unbound: places in the body that bind nothing, though callers may think that they do.
    """

    api: Api
    prompts: tuple[str | list[int], ...]
    messages: list[dict[str, Any]] | None
    adapter: AdapterChoice | MergedChoice | None
    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    best_of: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop: bool = False
    echo: bool = False
    stream: bool = False
    seed: int | None = None
    add_special_tokens: bool = True
    truncate: int | None = None
    truncate_keeps: PromptEnd = "last"
    user: str | None = None
    rids: tuple[str, ...] = ()
    further: tuple[list[dict[str, Any]], ...] = ()
    pictures: tuple[tuple[GivenPicture, ...], ...] = ()
    template: TemplateOptions = TemplateOptions()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    cache_salt: str = ""
    priority: int = 0
    drafts: bool = True
    shape: Shape | None = None
    tools: Tools | None = None
    divides_reasoning: bool = False
    thinking_budget: int | None = None
    lists_all: bool = False
    bad_words: tuple[str, ...] = ()
    vector: VectorCall | None = None
    last_states: bool = False
    routed_experts: bool = False
    unbound: tuple[str, ...] = ()


class TopToken(NamedTuple):
    """One of the likeliest at a token's place. text: its own."""

    token_id: int
    text: str
    logprob: float
    special: bool = False


class TextToken(msgspec.Struct, frozen=True):
    """One generated or prompt token. text: what it adds to the text ("" inside a UTF-8 sequence).

    token: the token's own text, whatever its neighbours. top: the likeliest first.
    raw: its bytes where they are no UTF-8 by themselves, else None. rank: see TokenLogprob.
    listed: the tokens whose logprobs the call lists by id, in its order.
    """

    token_id: int
    text: str
    token: str
    logprob: float | None
    special: bool
    top: tuple[TopToken, ...] = ()
    raw: bytes | None = None
    rank: int | None = None
    listed: tuple[TopToken, ...] = ()


class TextEvent(msgspec.Struct, frozen=True):
    """New text of one choice. Text that may still become part of a stop string is held back.

    The event with `finish` is the choice's last, but for one that holds nothing but `vector`, see
    ChoiceResult, where `last_states` are wanted. tokens: empty unless logprobs were asked for.
    num_tokens: generated since the event before, whether or not `tokens` lists them. token_ids:
    their ids. reasoning, calls: what is no part of the text, where the answer is divided.
    num_reasoning: tokens that are newly known to be the reasoning's. matched, elapsed_s, routed:
    see ChoiceResult; with `finish`.
    """

    prompt_index: int
    choice: int
    text: str
    tokens: tuple[TextToken, ...]
    finish: FinishReason | None = None
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    num_reasoning: int = 0
    matched: int | str | None = None
    elapsed_s: float = 0.0
    vector: tuple[float, ...] = ()
    routed: RoutedExperts | None = None


class ChoiceResult(msgspec.Struct, frozen=True):
    """A whole choice. sum_logprob: over generated tokens, when logprobs were asked for.

    token_ids: of all generated tokens, the one that ended the choice included. reasoning, calls:
    what is no part of the text, where the answer is divided. reasoning_tokens: of
    `generated_tokens`, those of the reasoning and its markers. matched: the stop string or the
    token that ended it. elapsed_s: from the request's arrival to the choice's end. vector: what
    was wanted of the prompt in place of an answer, or the answer's last state. routed: experts of
    the tokens of prompt and answer but the last one, which nothing was computed of.
    """

    prompt_index: int
    choice: int
    text: str
    tokens: tuple[TextToken, ...]
    finish: FinishReason
    generated_tokens: int
    sum_logprob: float | None = None
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0
    matched: int | str | None = None
    elapsed_s: float = 0.0
    vector: tuple[float, ...] = ()
    routed: RoutedExperts | None = None


class PromptInfo(msgspec.Struct, frozen=True):
    """Facts about a prompt that are known before the first token. tokens: with logprobs when prompt
    logprobs were asked for. token_ids: as the model read them. spans: characters of each token,
    where tokens have classes; nothing of the text = none.
    """

    prompt_index: int
    text: str
    num_tokens: int
    cached_tokens: int = 0
    tokens: tuple[TextToken, ...] = ()
    token_ids: Sequence[int] = ()
    spans: Sequence[tuple[int, int]] = ()


class AnswerHead(msgspec.Struct, frozen=True):
    """Facts that every part of one answer shares. model: as the caller named it.

    seed: the one in use. labels: of a classifier's classes; of_tokens: each token has them.
    unbound: see GenerationCall.
    adapter_scale: as asked for. receipt: says what the answer has cost; None without prices.
    """

    request_id: str
    created: int
    model: str
    adapter_id: str | None
    adapter_digest: str | None
    seed: int
    base_digest: str = ""
    labels: tuple[str, ...] = ()
    of_tokens: bool = False
    unbound: tuple[str, ...] = ()
    adapter_scale: float = 1.0
    receipt: Callable[[], Receipt] | None = None
