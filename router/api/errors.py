"""The one table of errors: the status, type and code of each cause in each API. Pure."""

import math
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from loraplex.adapters.errors import AdapterError, AdapterErrorCode, Violation
from loraplex.router.call import Cause, RequestError
from loraplex.server.protocol import ErrorCode, SamplingParams

# The shape of an error: LoRAX's {"error", "error_type"}, OpenAI's {"error": {…}} or Anthropic's
# {"type": "error", "error": {…}}. `vllm` is OpenAI's with the statuses that vLLM's two LoRA routes
# have, SGLang's and SageMaker's.
Dialect = Literal["lorax", "openai", "vllm", "anthropic"]

_MESSAGES = "/v1/messages"
_VLLM_ROUTES = (
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/load_lora_adapter", "/unload_lora_adapter"),
)
_OPENAI_ROUTES = (
    *("/detokenize", "/tokenizer_info", "/flush_cache", "/abort_request"),
    *("/classify", "/score", "/rerank", "/v2/rerank"),
    *("/pooling", "/v2/embed", "/v2/chat", "/cohere/v2/chat"),
    *("/inference/v1/generate", "/pause", "/resume", "/is_paused", "/get_world_size"),
)


class _Row(msgspec.Struct, frozen=True):
    """One cause. code: OpenAI's `code`; *_status: a dialect's, where it differs from status.

    Anthropic's types follow from statuses.
    """

    status: int
    type: str
    code: str | None
    error_type: str
    lorax_status: int | None = None
    vllm_status: int | None = None
    anthropic_status: int | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"

# `type` as OpenAI's SDKs know it; `error_type` as lorax-client knows it (validation, overloaded,
# generation, incomplete_generation) wherever one of those fits.
_TABLE: dict[Cause, _Row] = {
    "invalid": _Row(400, _INVALID, None, "validation", 422),
    "unsupported": _Row(400, _INVALID, "unsupported_parameter", "validation", 422),
    "unknown_parameter": _Row(400, _INVALID, "unknown_parameter", "validation", 422),
    "context_length": _Row(400, _INVALID, "context_length_exceeded", "validation", 422),
    "invalid_image": _Row(400, _INVALID, "invalid_image", "validation", 422),
    "template_error": _Row(400, _INVALID, "template_error", "template_error", 422),
    "unauthorized": _Row(401, "authentication_error", "invalid_api_key", "unauthorized"),
    "forbidden": _Row(403, "permission_error", "forbidden", "forbidden"),
    "adapter_not_found": _Row(404, _INVALID, "model_not_found", "adapter_not_found"),
    "key_not_found": _Row(404, _INVALID, "key_not_found", "key_not_found"),
    "file_not_found": _Row(404, _INVALID, "file_not_found", "file_not_found"),
    "batch_not_found": _Row(404, _INVALID, "batch_not_found", "batch_not_found"),
    "response_not_found": _Row(404, _INVALID, "response_not_found", "response_not_found"),
    "route_not_found": _Row(404, _INVALID, "unknown_url", "not_found"),
    "method_not_allowed": _Row(405, _INVALID, "method_not_allowed", "method_not_allowed"),
    "body_timeout": _Row(408, _INVALID, "body_timeout", "body_timeout"),
    "conflict": _Row(409, _INVALID, "conflict", "conflict", vllm_status=400),
    "gone": _Row(410, _INVALID, "gone", "gone", vllm_status=404),
    "too_large": _Row(413, _INVALID, "body_too_large", "body_too_large"),
    "media_type": _Row(415, _INVALID, "unsupported_media_type", "unsupported_media_type"),
    "adapter_invalid": _Row(422, _INVALID, "adapter_invalid", "adapter_invalid", vllm_status=400),
    "adapter_too_large": _Row(
        status=422,
        type=_INVALID,
        code="adapter_too_large",
        error_type="adapter_too_large",
        vllm_status=400,
    ),
    "overloaded": _Row(429, "rate_limit_error", "overloaded", "overloaded", anthropic_status=529),
    "rate_limited": _Row(429, "rate_limit_error", "rate_limit_exceeded", "rate_limited"),
    "unavailable": _Row(503, _SERVER, "unavailable", "unavailable"),
    "not_served": _Row(501, _SERVER, "not_served", "not_served"),
    "deadline": _Row(504, _SERVER, "deadline_exceeded", "deadline_exceeded"),
    "incomplete": _Row(500, _SERVER, "incomplete_generation", "incomplete_generation"),
    "idempotency_conflict": _Row(409, _INVALID, "idempotency_conflict", "idempotency_conflict"),
    "idempotency_mismatch": _Row(422, _INVALID, "idempotency_mismatch", "idempotency_mismatch"),
    "quarantined": _Row(500, _SERVER, "request_quarantined", "request_quarantined"),
    "internal": _Row(500, _SERVER, "internal_error", "generation"),
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# OpenAI's clients retry every 409 and 5xx unless a header forbids it.
_NO_RETRY: frozenset[Cause] = frozenset(
    ("quarantined", "conflict", "idempotency_conflict", "not_served")
)
# The credentials that are asked for (RFC 9110 section 11.6.1).
_CHALLENGE = {"www-authenticate": "Bearer"}
# Causes for which a Retry-After is sent even when nobody knew how long.
_RETRY_AFTER_S: dict[Cause, float] = {"overloaded": 1.0, "rate_limited": 1.0, "unavailable": 2.0}

_OF_ADAPTER: dict[AdapterErrorCode, Cause] = {
    "bad_ref": "invalid",
    "not_found": "adapter_not_found",
    "forbidden": "forbidden",
    "unauthorized": "unauthorized",
    "invalid": "adapter_invalid",
    "too_large": "adapter_too_large",
    "conflict": "conflict",
    "gone": "gone",
    "missing": "unavailable",
    "unavailable": "unavailable",
}
_OF_ENGINE: dict[ErrorCode, Cause] = {
    "invalid_request": "invalid",
    "invalid_image": "invalid_image",
    "bad_grammar": "invalid",
    "context_length": "context_length",
    "adapter_unavailable": "unavailable",
    "out_of_memory": "unavailable",
    "deadline": "deadline",
    "overloaded": "overloaded",
    "engine_lost": "unavailable",
    "unheard": "unavailable",
    "draining": "unavailable",
    "internal": "internal",
}

# Fields of requests that a worker may blame; the others are not the caller's.
_OURS = frozenset(("grammar", "end_token_ids", "names_once", "thinking"))
_BLAMED = frozenset(SamplingParams.__struct_fields__) - _OURS | {"return_routed_experts"}


class LoraxError(msgspec.Struct, frozen=True):
    """An error of the LoRAX routes, and of all that are not below `/v1`."""

    error: str
    error_type: str
    violations: list[Violation] | UnsetType = UNSET


class OpenAIErrorDetail(msgspec.Struct, frozen=True):
    """Details of an error of OpenAI's routes. param: the field at fault. violations: of an adapter
    that is refused.
    """

    message: str
    type: str
    param: str | None
    code: str | None
    violations: list[Violation] | UnsetType = UNSET


class OpenAIError(msgspec.Struct, frozen=True):
    """An error of the routes below `/v1`."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """Details of an error of Anthropic's routes. message: it names the field at fault, and has an
    adapter's violations. details: facts for programs.
    """

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error of `/v1/messages` and what is below it."""

    error: AnthropicErrorDetail
    request_id: str


AnyError = LoraxError | OpenAIError | AnthropicError


class ErrorAnswer(msgspec.Struct, frozen=True):
    """A whole error response; `content-type: application/json` is among the headers."""

    status: int
    headers: dict[str, str]
    body: bytes


def dialect_of_path(path: str) -> Dialect:
    """The API whose form a path's errors have, if no body says it, or the path is no route."""
    if path in _VLLM_ROUTES or path.startswith("/adapters"):
        return "vllm"
    if path in _OPENAI_ROUTES:
        return "openai"
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        return "anthropic"
    return "openai" if path == "/v1" or path.startswith("/v1/") else "lorax"


def from_adapter_error(error: AdapterError, param: str | None = None) -> RequestError:
    """Makes the caller's error from the error of a catalog, source or worker about an adapter."""
    return RequestError(
        _OF_ADAPTER[error.code],
        error.message,
        param=param,
        retry_after_s=error.retry_after_s,
        violations=error.violations,
    )


def from_engine_error(code: ErrorCode, message: str, param: str | None = None) -> RequestError:
    """Makes the caller's error from the error of a worker about a sequence. A worker that blames a
    field begins with its name. param: another place that is at fault.
    """
    cause, field = _OF_ENGINE[code], message.partition(": ")[0]
    if cause == "invalid" and field in _BLAMED:
        param = field
    return RequestError(cause, message, param=param)


def status_of(cause: Cause, dialect: Dialect) -> int:
    row = _TABLE[cause]
    own: int | None = {
        "lorax": row.lorax_status,
        "vllm": row.vllm_status,
        "anthropic": row.anthropic_status,
    }.get(dialect)
    return row.status if own is None else own


def error_object(error: RequestError, dialect: Dialect, request_id: str = "") -> AnyError:
    """Makes the JSON body of an error. An invalid adapter's violations are all listed."""
    row = _TABLE[error.cause]
    violations = list(error.violations) or UNSET
    if dialect == "lorax":
        return LoraxError(_lorax_message(error, row), row.error_type, violations)
    message = _with_violations(error)
    if dialect == "anthropic":
        kind = _name(row, error.cause, dialect)
        detail = AnthropicErrorDetail(kind, message, error.details or UNSET)
        return AnthropicError(detail, request_id)
    return OpenAIError(OpenAIErrorDetail(message, row.type, error.param, row.code, violations))


def error_answer(error: RequestError, dialect: Dialect, request_id: str = "") -> ErrorAnswer:
    """The response to a request that fails before its first byte. request_id: Anthropic's."""
    status = status_of(error.cause, dialect)
    headers = {**error.headers, "content-type": "application/json"}
    if status == 401:
        headers |= _CHALLENGE
    retry_after_s = error.retry_after_s
    if retry_after_s is None:
        retry_after_s = _RETRY_AFTER_S.get(error.cause)
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    elif error.cause in _NO_RETRY:
        headers["x-should-retry"] = "false"
    body = msgspec.json.encode(error_object(error, dialect, request_id))
    return ErrorAnswer(status, headers, body)


def error_table(dialect: Dialect) -> dict[int, tuple[str, ...]]:
    """Status -> the machine-readable names it comes with, for the API's description."""
    table: dict[int, list[str]] = {}
    for cause, row in _TABLE.items():
        name = _name(row, cause, dialect)
        names = table.setdefault(status_of(cause, dialect), [])
        if name not in names:
            names.append(name)
    return {status: tuple(names) for status, names in sorted(table.items())}


def _name(row: _Row, cause: Cause, dialect: Dialect) -> str:
    """The name by which a program tells errors apart."""
    if dialect == "lorax":
        return row.error_type
    if dialect == "anthropic":
        return _ANTHROPIC_TYPES.get(status_of(cause, dialect), _INVALID)
    return row.code or row.type


def _lorax_message(error: RequestError, row: _Row) -> str:
    message = _with_violations(error)
    if row.error_type == "validation":
        return f"Input validation error: {message}"
    if row.error_type in ("generation", "incomplete_generation"):
        return f"Request failed during generation: {message}"
    return message


def _with_violations(error: RequestError) -> str:
    """Adds the violations to an error's text: most clients show nothing else. Each is said once."""
    lines = [f"{v} ({v.code})" for v in error.violations]
    first = f": {error.violations[0].message}" if lines else "\n"
    return "\n- ".join([error.message.partition(first)[0] if lines else error.message, *lines])
