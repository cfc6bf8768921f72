"""One table: every cause in every dialect."""

import json
from typing import get_args

import pytest

from loraplex.adapters.errors import AdapterError, AdapterErrorCode, Violation
from loraplex.router.api.errors import (
    Dialect,
    dialect_of_path,
    error_answer,
    error_table,
    from_adapter_error,
    from_engine_error,
    status_of,
)
from loraplex.router.call import Cause, RequestError
from loraplex.server.protocol import ErrorCode

DIALECTS: tuple[Dialect, ...] = ("lorax", "openai", "anthropic")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cause", get_args(Cause))
def test_every_cause_has_an_answer(cause: Cause, dialect: Dialect) -> None:
    answer = error_answer(RequestError(cause, "why", param="x"), dialect)
    assert answer.status in error_table(dialect)
    assert 400 <= answer.status < 600
    body = json.loads(answer.body)
    if dialect == "lorax":
        assert set(body) == {"error", "error_type"}
        assert "why" in body["error"]
    elif dialect == "anthropic":
        assert set(body) == {"type", "error", "request_id"}
        assert body["error"]["message"] == "why"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["param"] == "x"


def test_details_for_programs_are_anthropics() -> None:
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    error = RequestError("unsupported", "why", param="thread", details=details)
    answer = error_answer(error, "anthropic")
    assert (answer.status, json.loads(answer.body)["error"]["details"]) == (400, details)
    assert "details" not in json.loads(error_answer(error, "openai").body)["error"]


@pytest.mark.parametrize(
    ("cause", "openai", "lorax"),
    [
        ("invalid", 400, 422),
        ("context_length", 400, 422),
        ("adapter_not_found", 404, 404),
        ("too_large", 413, 413),
        ("adapter_invalid", 422, 422),
        ("overloaded", 429, 429),
        ("unavailable", 503, 503),
        ("not_served", 501, 501),
        ("deadline", 504, 504),
    ],
)
def test_statuses_of_the_two_apis(cause: Cause, openai: int, lorax: int) -> None:
    assert (status_of(cause, "openai"), status_of(cause, "lorax")) == (openai, lorax)


@pytest.mark.parametrize(
    ("cause", "status", "kind"),
    [
        ("invalid", 400, "invalid_request_error"),
        ("unauthorized", 401, "authentication_error"),
        ("forbidden", 403, "permission_error"),
        ("adapter_not_found", 404, "not_found_error"),
        ("method_not_allowed", 405, "invalid_request_error"),
        ("too_large", 413, "request_too_large"),
        ("adapter_invalid", 422, "invalid_request_error"),
        ("rate_limited", 429, "rate_limit_error"),
        ("internal", 500, "api_error"),
        ("incomplete", 500, "api_error"),
        ("not_served", 501, "api_error"),
        ("unavailable", 503, "overloaded_error"),
        ("deadline", 504, "timeout_error"),
        ("overloaded", 529, "overloaded_error"),
    ],
)
def test_anthropics_types(cause: Cause, status: int, kind: str) -> None:
    answer = error_answer(RequestError(cause, "why"), "anthropic", "req1")
    body = json.loads(answer.body)
    assert (answer.status, body["error"]["type"]) == (status, kind)
    assert body["request_id"] == "req1"


@pytest.mark.parametrize("code", get_args(AdapterErrorCode))
def test_every_adapter_error_has_a_cause(code: AdapterErrorCode) -> None:
    assert from_adapter_error(AdapterError(code, "why"), "model").message == "why"


@pytest.mark.parametrize("code", get_args(ErrorCode))
def test_every_engine_error_has_a_cause(code: ErrorCode) -> None:
    assert from_engine_error(code, "why").message == "why"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("return_routed_experts: the model has no experts", "return_routed_experts"),
        ("prompt_logprobs: at most 400000 values", "prompt_logprobs"),
        ("end_token_ids: expected at most 1024", None),
        ("the model writes no text: it gives vectors alone", None),
    ],
)
def test_a_field_that_a_worker_blames_is_named(message: str, param: str | None) -> None:
    error = from_engine_error("invalid_request", message)
    assert (error.message, error.param) == (message, param)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_violations_are_listed(dialect: Dialect) -> None:
    violations = (
        Violation("rank_mismatch", "layers.0.q_proj", "expected rank 8, got 9"),
        Violation("unknown_target", "w1", "the base has no such module"),
    )
    text = "the adapter cannot be served: expected rank 8, got 9 (and 1 more)"
    error = from_adapter_error(AdapterError("invalid", text, violations))
    body = json.loads(error_answer(error, dialect).body)
    target = body if dialect == "lorax" else body["error"]
    if dialect != "anthropic":
        assert [v["code"] for v in target["violations"]] == ["rank_mismatch", "unknown_target"]
    message = body["error"] if dialect == "lorax" else target["message"]
    assert message.count("expected rank 8, got 9") == 1
    assert "no such module" in message


@pytest.mark.parametrize(
    ("cause", "seconds", "header"),
    [
        ("overloaded", None, "1"),
        ("unavailable", 0.2, "1"),
        ("unavailable", 7.1, "8"),
        ("invalid", None, None),
    ],
)
def test_retry_after(cause: Cause, seconds: float | None, header: str | None) -> None:
    answer = error_answer(RequestError(cause, "why", retry_after_s=seconds), "openai")
    assert answer.headers.get("retry-after") == header


@pytest.mark.parametrize("cause", get_args(Cause))
def test_which_errors_clients_must_not_retry(cause: Cause) -> None:
    """Of those that OpenAI's would: 409 and from 500 on."""
    final = cause in ("quarantined", "conflict", "idempotency_conflict", "not_served")
    headers = error_answer(RequestError(cause, "why"), "openai").headers
    assert headers.get("x-should-retry") == ("false" if final else None)
    later = error_answer(RequestError(cause, "why", retry_after_s=1.0), "openai").headers
    assert "x-should-retry" not in later


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_refused_caller_learns_what_opens(cause: Cause, dialect: Dialect) -> None:
    answer = error_answer(RequestError(cause, "why"), dialect)
    assert (answer.headers.get("www-authenticate") == "Bearer") == (answer.status == 401)


def test_paths_show_the_dialect() -> None:
    for path in ("/v1", "/v1/models", "/v1/nowhere"):
        assert dialect_of_path(path) == "openai"
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        assert dialect_of_path(path) == "anthropic"
    assert dialect_of_path("/v1/messagesx") == "openai"
    for path in ("/", "/generate", "/v10", "/health"):
        assert dialect_of_path(path) == "lorax"
