"""Sequences to generate, and their tokens. Pure."""

from typing import Literal

import msgspec

from loraplex.server.protocol.pictures import PictureSpan


class NamesOnce(msgspec.Struct, frozen=True, array_like=True):
    """JSON in whose objects each name stands once, though its grammar lets names come again. The
    grammar spells each name in one way alone.

    begins: texts that such JSON follows, or brackets that begin it. opens: of reasoning at the
    output's begin; "" = it has begun. closes: of reasoning; "" = there is none. run_out: some
    names have begins with which only so many names begin.
    """

    begins: tuple[str, ...]
    opens: str = ""
    closes: str = ""
    run_out: bool = False


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning ends after so many tokens of its text. opens: tokens that begin it, () = it has
    begun. closes: tokens that end it, at least one."""

    tokens: int
    opens: tuple[int, ...]
    closes: tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """The rules by which tokens are drawn. Defaults change nothing.

    temperature: 0 = greedy. top_k: 0 = off. top_p, typical_p: 1 = off. min_p: 0 = off.
    repetition_penalty: over prompt and output (1 = off); frequency and presence: over the output.
    max_tokens: of output, accepted ones included.
    logprobs: None = none; n >= 0 = those of the chosen token and the n most likely.
    prompt_logprobs: the same for the prompt's tokens.
    stop_token_ids: end the output, as the model's own ends do: end_token_ids and the worker's.
    grammar: what the output must be, for llguidance: Lark, or JSON of its grammars; "" = anything.
    allowed_token_ids: no others are drawn, the ends of the output excepted; () = all.
    bad_words: sequences of tokens that are never completed.
    logprob_token_ids: further tokens whose logprobs are reported, wherever there are any.
    thinking: bound of the reasoning; None = none.
    names_once: keeps names from coming twice in an object of JSON; None = the grammar suffices.
    processed_logprobs: logprobs of drawn tokens are those that the draw used, minus infinity for
    what it could not choose; else those of the raw logits, as those of the prompt always are.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    end_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprob_token_ids: tuple[int, ...] = ()
    names_once: NamesOnce | None = None
    thinking: ThinkingBudget | None = None
    processed_logprobs: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens may not be drawn, which of them being known a token ahead alone."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words or self.thinking)


Finish = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal[
    "invalid_request",  # a value that the engine cannot take (an id out of range, …)
    "invalid_image",  # a picture that cannot be read, or is not what its header says
    "bad_grammar",  # `grammar` cannot be compiled, or not within the engine's limits
    "context_length",  # prompt and max_tokens do not fit
    "adapter_unavailable",  # the adapter could not be brought to the device
    "out_of_memory",
    "deadline",  # dropped: its time was over
    "overloaded",  # the worker has no room
    "engine_lost",  # the engine died under it; a retry elsewhere is safe
    "unheard",  # the router hears nothing of the worker; a retry elsewhere is safe
    "draining",
    "internal",
]

# What the end of an engine says of a sequence that was there: nothing, since the engine had not
# begun it; perhaps something; or much, as it was one of few.
Evidence = Literal["none", "weak", "strong"]

# From here on a sequence is a batch's: nobody waits for its tokens.
BACKGROUND_PRIORITY = 500


TextPooling = Literal["last", "mean", "first", "max"]
Pooling = Literal[TextPooling, "all"]
# What numbers are wanted of a prompt: the last norm's output, what the score head makes of it, or
# the logits of some tokens.
VectorKind = Literal["hidden", "scores", "logits"]


class VectorParams(msgspec.Struct, frozen=True, array_like=True):
    """Numbers of the prompt that a sequence ends with in place of an answer.

    pooling: of the prompt's last token or its first one, the mean or the largest numbers over all
    of its tokens; or the scores of each token, one after the other. Tokens that see none behind
    them have `last`, and `mean` of `hidden`.
    token_ids: those whose `logits` are wanted. second: the first token of a pair's second text;
    None = there is one text.
    """

    kind: VectorKind = "hidden"
    pooling: Pooling = "last"
    token_ids: tuple[int, ...] = ()
    second: int | None = None


class RoutingForm(msgspec.Struct, frozen=True, array_like=True):
    """Numbers that say which experts a token goes to: `top_k` for each of the model's layers, zeros
    for a layer without experts, of `itemsize` bytes each, little-endian."""

    layers: int
    top_k: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return self.layers * self.top_k * self.itemsize


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """Experts of tokens that follow one another, the first of which has the position `start`."""

    form: RoutingForm
    start: int
    chosen: bytes

    @property
    def end(self) -> int:
        """The position behind the last of the tokens."""
        return self.start + len(self.chosen) // self.form.nbytes


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag="gr"):
    """One sequence to generate. `n` choices are n requests with the same prompt and seed.

    adapter: digest, or None for the base. accepted_ids: output already given to the client
    (resume); generation goes on at index len(accepted_ids). deadline_s: time left.
    salt: separates tenants in the prefix cache. adapter_from: of an activated adapter, the first
    token of the prompt on which it acts; None = it acts on none, nor on the answer.
    vector: the prompt is read for that, and nothing is generated: `sampling.max_tokens` is 0.
    drafts: whose answers of the same adapter suggest drafts; None = it has no drafts.
    vocab_size: of its adapter, where that has ids behind the base's; else None.
    tenant: an opaque word for whose the sequence is, by which work takes turns; "" = nobody's.
    adapter_scale: multiplies all that the adapter adds; only for an adapter of LoRA alone.
    pictures: in the order of the prompt; their placeholders do not overlap.
    routed_experts: the experts that its tokens go to are reported. All tokens are computed then.
    """

    request_id: str
    attempt: int
    choice: int
    adapter: str | None
    prompt_ids: list[int]
    accepted_ids: list[int]
    sampling: SamplingParams
    seed: int
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""
    adapter_from: int | None = 0
    vector: VectorParams | None = None
    drafts: str | None = None
    vocab_size: int | None = None
    tenant: str = ""
    adapter_scale: float = 1.0
    pictures: tuple[PictureSpan, ...] = ()
    routed_experts: bool = False

    @property
    def acting(self) -> str | None:
        """Digest under which the adapter acts, as of `acting`; None for the base."""
        return None if self.adapter is None else acting(self.adapter, self.adapter_scale)


def acting(digest: str, scale: float) -> str:
    """A name for what an adapter does in a request: its digest, and its scale where that is not 1.
    Whatever depends on the adapter's effect is kept under this name."""
    return digest if scale == 1 else f"{digest}*{scale!r}"


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="ab"):
    """Stop a request. choice None = all of its choices. It still ends in one terminal event."""

    request_id: str
    attempt: int
    choice: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one token. logprob: None only for a prompt's first token. top: (id, logprob),
    most likely first.

    rank: of a prompt's token, 1 = no token of the vocabulary is likelier; None where not counted.
    listed: the logprobs of the request's `logprob_token_ids`, in their order.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    listed: tuple[float, ...] = ()


class DeviceCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of all devices of a worker that a sequence took. device_s: its part of steps. copy_s:
    of the copy of its adapter, if the sequence was the first that waited for it.
    """

    device_s: float
    copy_s: float = 0.0


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence. The event with `finish` set is the last, and the only such.

    index: position in the output of the first of token_ids. A stop token is included in token_ids.
    logprobs: parallel to token_ids when asked for.
    prompt_logprobs, cached_tokens: on the first event. load_s: there too, the seconds for which it
    waited for its adapter, if it did. vector: on the last event of a sequence that was read for
    one, its numbers as little-endian float32. cost: on the last event, if a step had the sequence.
    routed: the experts of the tokens that were computed since the event before, if asked for.
    evidence: of `engine_lost`, that the sequence itself was the cause; None = nothing is known.
    """

    request_id: str
    attempt: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int | None = None
    error: ErrorCode | None = None
    message: str | None = None
    load_s: float | None = None
    vector: bytes | None = None
    cost: DeviceCost | None = None
    routed: RoutedExperts | None = None
    evidence: Evidence | None = None


class StepEvents(msgspec.Struct, frozen=True, array_like=True, tag="se"):
    """All events of one engine step for one router."""

    step: int
    events: tuple[TokenEvent, ...]
