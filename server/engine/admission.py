"""The engine's check of requests, so that no decoded value can harm a step. Pure."""

import math
from typing import NamedTuple

from loraplex.server.engine.executor import ExecutorLimits, PictureLimits
from loraplex.server.engine.memory.picture_cache import blocks_of
from loraplex.server.engine.memory.room import pages_held, tokens_that_fit
from loraplex.server.protocol import (
    ErrorCode,
    GenerateRequest,
    PictureSpan,
    SamplingParams,
    VectorParams,
)

# Alternatives of the tokens of one event, drafts too, must fit a frame.
MAX_TOP_LOGPROBS = 1 << 16
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_TOKEN_IDS = 256
MAX_END_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 2048
MAX_BAD_WORDS = 1024
MAX_VECTOR_TOKEN_IDS = 64
MAX_BAD_WORD_TOKENS = 128
# A bias beyond float32 would be infinite on the device, and the adapter would get the blame.
_LARGEST_BIAS = 1e6
# Prompt logprobs travel in one event, which must fit the worker's frame of 16 MiB: a value takes 15
# bytes, and a token 24.
MAX_PROMPT_LOGPROBS = 400_000
# The experts of a prompt travel in one event, too, perhaps with its logprobs.
MAX_ROUTED_BYTES = 8 << 20
# So do the scores of a text's tokens, of up to 256 labels each.
MAX_SCORED_TOKENS = 15 << 10
_INT32_MAX = 2**31 - 1


class Refusal(NamedTuple):
    """Why a request cannot be taken."""

    code: ErrorCode
    message: str


def token_limit(request: GenerateRequest, limits: ExecutorLimits) -> int:
    """Prompt and output tokens together that this request may reach."""
    return min(len(request.prompt_ids) + request.sampling.max_tokens, limits.max_context)


def num_ids(request: GenerateRequest, limits: ExecutorLimits) -> int:
    """The number of ids that may stand in the request, or be drawn for it."""
    return limits.vocab_size if request.vocab_size is None else request.vocab_size


def refuse(request: GenerateRequest, limits: ExecutorLimits) -> Refusal | None:
    """The first reason why this request can never run here, or None."""
    problem = _bad_vocabulary(request, limits) or _bad_ids(request, num_ids(request, limits))
    problem = problem or bad_sampling(request.sampling)
    problem = problem or _bad_identity(request) or _too_many_logprobs(request)
    problem = problem or _bad_vector(request, limits) or _too_many_routed(request, limits)
    if problem is not None:
        return Refusal("invalid_request", problem)
    problem = _bad_pictures(request, limits) if request.pictures else None
    if problem is not None:
        return Refusal("invalid_image", problem)
    return _too_long(request, limits)


def _bad_vocabulary(request: GenerateRequest, limits: ExecutorLimits) -> str | None:
    least, most = limits.vocab_size, limits.most_ids
    if request.vocab_size is None:
        return None
    if request.adapter is None or request.adapter_from != 0:
        return "vocab_size: expected an adapter that acts on all tokens"
    if least < request.vocab_size <= most:
        return None
    return f"vocab_size: expected {least + 1} to {most}, got {request.vocab_size}"


def _bad_ids(request: GenerateRequest, vocab_size: int) -> str | None:
    sampling = request.sampling
    lists = (
        ("prompt_ids", request.prompt_ids),
        ("accepted_ids", request.accepted_ids),
        ("stop_token_ids", sampling.stop_token_ids),
        ("end_token_ids", sampling.end_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logprob_token_ids", sampling.logprob_token_ids),
        ("vector", request.vector.token_ids if request.vector else ()),
        *(("bad_words", word) for word in sampling.bad_words),
    )
    for name, ids in lists:
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            return f"{name}: token id {bad} is outside the vocabulary (0 to {vocab_size - 1})"
    if not request.prompt_ids:
        return "prompt_ids: expected at least one token, got none"
    if not 0 <= (request.adapter_from or 0) < len(request.prompt_ids):
        return f"adapter_from: expected a place in the prompt, got {request.adapter_from}"
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        return f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS}"
    if len(sampling.end_token_ids) > MAX_END_TOKEN_IDS:
        return f"end_token_ids: expected at most {MAX_END_TOKEN_IDS}"
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        return f"logit_bias: expected at most {MAX_LOGIT_BIAS} tokens"
    if len(sampling.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        return f"logprob_token_ids: expected at most {MAX_LOGPROB_TOKEN_IDS}"
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        return f"bad_words: expected at most {MAX_BAD_WORDS}"
    return None


def bad_sampling(sampling: SamplingParams) -> str | None:
    """The first reason why no request can have these parameters, or None."""
    # NaN fails every comparison, and so every range.
    ranges: tuple[tuple[str, float | None, float, float], ...] = (
        ("temperature", sampling.temperature, 0.0, 1e6),
        ("top_k", sampling.top_k, 0, _INT32_MAX),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("typical_p", sampling.typical_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-3, 1e3),
        ("frequency_penalty", sampling.frequency_penalty, -1e6, 1e6),
        ("presence_penalty", sampling.presence_penalty, -1e6, 1e6),
        ("max_tokens", sampling.max_tokens, 0, _INT32_MAX),
        ("min_tokens", sampling.min_tokens, 0, _INT32_MAX),
        ("logprobs", sampling.logprobs, 0, MAX_TOP_LOGPROBS),
        ("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_TOP_LOGPROBS),
    )
    for name, value, low, high in ranges:
        if value is not None and not low <= value <= high:
            return f"{name}: expected {low} to {high}, got {value}"
    for name in ("top_p", "typical_p"):
        if getattr(sampling, name) == 0:
            return f"{name}: expected more than 0"
    if any(not 0 < len(word) <= MAX_BAD_WORD_TOKENS for word in sampling.bad_words):
        return f"bad_words: expected 1 to {MAX_BAD_WORD_TOKENS} tokens each"
    if sampling.grammar and sampling.ignore_eos:
        return "ignore_eos: expected false with a grammar, which says where the output ends"
    for bias in sampling.logit_bias.values():
        if not -_LARGEST_BIAS <= bias <= _LARGEST_BIAS:
            return f"logit_bias: expected {-_LARGEST_BIAS} to {_LARGEST_BIAS}, got {bias}"
    return None


def _bad_identity(request: GenerateRequest) -> str | None:
    if request.adapter == "":
        return "adapter: expected a digest or nothing, got an empty string"
    if not 0 < abs(request.adapter_scale) < math.inf:
        return f"adapter_scale: expected a number other than 0, got {request.adapter_scale}"
    if not 0 <= request.choice <= _INT32_MAX:
        return f"choice: expected 0 to {_INT32_MAX}, got {request.choice}"
    if request.deadline_s is not None and math.isnan(request.deadline_s):
        return "deadline_s: expected seconds, got NaN"
    return None


def _too_many_logprobs(request: GenerateRequest) -> str | None:
    each, listed = request.sampling.prompt_logprobs, len(request.sampling.logprob_token_ids)
    if each is None or len(request.prompt_ids) * (each + listed + 1) <= MAX_PROMPT_LOGPROBS:
        return None
    return f"prompt_logprobs: at most {MAX_PROMPT_LOGPROBS} values over the prompt, ask for fewer"


def _too_many_routed(request: GenerateRequest, limits: ExecutorLimits) -> str | None:
    """Why the experts of the request's tokens cannot be reported, or None."""
    if not request.routed_experts:
        return None
    if limits.routing is None:
        return "return_routed_experts: the model has no experts that tokens are routed to"
    most = MAX_ROUTED_BYTES // limits.routing.nbytes
    if token_limit(request, limits) <= most:
        return None
    return f"return_routed_experts: at most {most} tokens of prompt and answer, ask for fewer"


def _bad_vector(request: GenerateRequest, limits: ExecutorLimits) -> str | None:
    vector = request.vector
    if vector is None:
        return None if limits.writes else "the model writes no text: it gives vectors alone"
    if request.adapter_from and not limits.is_causal:
        return "adapter: one that acts from a token on needs attention to earlier tokens alone"
    sampling = request.sampling
    if sampling.max_tokens or request.accepted_ids or sampling.prompt_logprobs is not None:
        return "vector: expected max_tokens 0, and neither accepted_ids nor prompt_logprobs"
    prompt_len = len(request.prompt_ids)
    problem = _bad_pooling(vector, limits) or _bad_parts(vector, prompt_len)
    if problem is not None:
        return problem
    if vector.pooling == "all" and prompt_len > MAX_SCORED_TOKENS:
        return f"vector: at most {MAX_SCORED_TOKENS} tokens of a text have scores, got {prompt_len}"
    if vector.kind == "scores" and not limits.num_classes and request.adapter is None:
        return "vector: the model has no score head"
    return None


def _bad_pictures(request: GenerateRequest, whole: ExecutorLimits) -> str | None:
    limits, end = whole.pictures, 0
    if limits is None:
        return "pictures: the model reads none here"
    for span in request.pictures:
        problem = _bad_span(span, limits)
        if problem is None and limits.is_joined:
            problem = _not_in_one_step(span, request.adapter_from or 0, whole)
        if problem is None and not end <= span.start <= len(request.prompt_ids) - span.length:
            problem = f"token {span.start} is no place for one, behind those before it"
        begin, end = span.start, span.start + span.length
        ids = request.prompt_ids[begin:end]
        held = ids.count(limits.token_id), {*ids[:1], *ids[-1:]}
        if problem is None and held != (limits.form.tokens(span.grid), {limits.token_id}):
            problem = f"tokens {begin} to {end - 1} must hold its placeholders, {limits.token_id}"
        if problem is not None:
            return f"{span.picture}: {problem}"
    if sum(blocks_of(request.pictures, limits).values()) <= limits.num_blocks:
        return None
    tokens = limits.num_blocks * limits.block_tokens
    return f"pictures: those of one prompt can have at most {tokens} tokens (--picture-memory)"


def _bad_span(span: PictureSpan, limits: PictureLimits) -> str | None:
    tokens = limits.form.tokens(span.grid) if limits.form.fits(span.grid) else 0
    if not 0 < tokens <= span.length:
        return f"a picture of {span.grid} patches does not take {span.length} tokens"
    if tokens > limits.most_tokens:
        most = f"{limits.most_tokens} (--picture-memory, --max-context)"
        return f"a picture of {tokens} tokens; one can have at most {most}"
    return None


def _not_in_one_step(span: PictureSpan, adapter_from: int, limits: ExecutorLimits) -> str | None:
    """Why no slice can have all tokens of a picture, whatever else a step computes; or None."""
    most = limits.max_step_tokens - limits.most_decodes
    if span.length > most:
        return (
            f"a picture of {span.length} tokens, which see each other; beside other sequences a"
            f" step has room for {most} (--max-step-tokens)"
        )
    if span.start < adapter_from < span.start + span.length:
        return "adapter_from must not lie within a picture, whose tokens see each other"
    return None


def _bad_parts(vector: VectorParams, prompt_len: int) -> str | None:
    if not 0 <= (vector.second or 0) <= prompt_len:
        return f"vector: expected a place in the prompt, got {vector.second}"
    if (vector.kind == "logits") is not bool(vector.token_ids):
        return "vector: expected token_ids with logits, and with nothing else"
    if len(vector.token_ids) > MAX_VECTOR_TOKEN_IDS:
        return f"vector: expected at most {MAX_VECTOR_TOKEN_IDS} token ids"
    return None


def _bad_pooling(vector: VectorParams, limits: ExecutorLimits) -> str | None:
    if vector.pooling == "all" and vector.kind != "scores":
        return f"vector: each token has scores, not {vector.kind}"
    if not limits.is_causal or vector.pooling in ("last", "all"):
        return None
    if vector.pooling != "mean":
        return f"vector: {vector.pooling} needs tokens that see all others"
    if vector.kind != "hidden":
        return f"vector: a mean is of hidden states, not of {vector.kind}"
    return None


def _too_long(request: GenerateRequest, limits: ExecutorLimits) -> Refusal | None:
    prompt_len, output_len = len(request.prompt_ids), len(request.accepted_ids)
    if prompt_len + min(1, request.sampling.max_tokens) > limits.max_context:
        return Refusal(
            "context_length",
            f"the prompt has {prompt_len} tokens; prompt and output together can have at most "
            f"{limits.max_context}",
        )
    limit = token_limit(request, limits)
    if prompt_len + output_len > limit:
        return Refusal(
            "invalid_request",
            f"accepted_ids: expected at most {limit - prompt_len} tokens, got {output_len}",
        )
    inputs = max(limit - 1, prompt_len)
    size, windows = limits.page_size, limits.page_windows
    if pages_held(inputs, size, windows) > limits.num_pages:
        capacity = tokens_that_fit(limits.num_pages, size, windows)
        return Refusal(
            "context_length",
            f"prompt and max_tokens need a KV cache of {inputs} tokens; this worker has {capacity}",
        )
    return None
