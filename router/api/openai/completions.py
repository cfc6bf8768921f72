"""OpenAI's `/v1/completions`: request bodies and answers. Pure."""

from loraplex.router.api.openai.common import (
    OpenAIBody,
    adapter_of,
    decode_openai,
    options_of,
    sampling_of,
)
from loraplex.router.api.openai.completions_answer import CompletionsFormatter
from loraplex.router.api.openai.shape import with_shape
from loraplex.router.api.request.body import require
from loraplex.router.api.request.fields import NonNegative, Positive
from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.api.request.prompts import prompts_of
from loraplex.router.call import GenerationCall

DEFAULT_MAX_TOKENS = 16


class CompletionsBody(OpenAIBody, frozen=True, kw_only=True):
    """prompt: a text, a list of texts, token ids, or a list of lists of token ids.

    max_tokens: 0 wants the prompt alone, with `echo`. add_special_tokens: around texts; true by
    default.
    """

    prompt: str | list[str | NonNegative | list[NonNegative]]
    max_tokens: NonNegative | None = None
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: NonNegative | None = None
    add_special_tokens: bool | None = None


def parse(body: bytes, limits: ApiLimits, bearer: str | None = None) -> ApiRequest:
    """Raises RequestError."""
    return request_of(decode_openai(body, CompletionsBody, limits), limits, bearer)


def request_of(request: CompletionsBody, limits: ApiLimits, bearer: str | None) -> ApiRequest:
    """Raises RequestError."""
    prompts = prompts_of(request.prompt, "prompt", limits.max_prompts)
    n = request.n or 1
    best_of = n if request.best_of is None else request.best_of
    _check_best_of(n, best_of, bool(request.stream), limits)
    max_tokens = request.max_tokens
    if max_tokens is None and "max_tokens" not in limits.sampling_defaults:
        max_tokens = DEFAULT_MAX_TOKENS
    require(max_tokens != 0 or request.echo, "expected at least 1, or 0 with `echo`", "max_tokens")
    sampling = sampling_of(
        request,
        limits,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=_prompt_logprobs(request),
    )
    call = GenerationCall(
        api="completions",
        prompts=prompts,
        messages=None,
        adapter=adapter_of(request, limits, bearer),
        sampling=sampling,
        max_tokens=max_tokens,
        n=n,
        best_of=best_of,
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
    )
    call = with_shape(call, request, limits)
    return ApiRequest(call, CompletionsFormatter, options_of(request, call))


def _prompt_logprobs(request: CompletionsBody) -> int | None:
    """Alternatives beside the prompt's tokens: asked for, or those of an echoed prompt."""
    echoed = request.logprobs if request.echo else None
    return max((n for n in (request.prompt_logprobs, echoed) if n is not None), default=None)


def _check_best_of(n: int, best_of: int, stream: bool, limits: ApiLimits) -> None:
    most = limits.max_n
    require(best_of <= most, f"expected at most {most}, got {best_of}", "best_of")
    require(best_of >= n, f"expected at least `n`, got {best_of}", "best_of")
    require(not stream or best_of == n, "must equal `n` when streaming", "best_of")
