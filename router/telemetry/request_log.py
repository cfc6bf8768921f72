"""One log line and one trace for each generation request, if the operator wants them."""

import json
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

from starlette.types import Scope

from loraplex.router.api.request.pictures import bare
from loraplex.router.call import GenerationCall
from loraplex.router.telemetry.request import NoTrace, RequestInHand, Value, begin
from loraplex.router.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

PROVIDER = "loraplex"
MAX_PROMPT_CHARS = 8192
Logged = Literal["no", "yes", "prompts"]


class RequestLog:
    """Begins and ends the log line and trace of each request. paths: of generation requests; others
    are neither logged nor traced.
    """

    def __init__(self, tracing: Tracing, paths: Collection[str], logged: Logged) -> None:
        self._tracing = tracing
        self._paths = paths
        self._logged = logged

    def begin(self, request_id: str, scope: Scope) -> RequestInHand:
        """Makes the request that is in hand from now on, in this task and those that it starts."""
        is_generation = scope["method"] == "POST" and scope["path"] in self._paths
        trace = self._tracing.begin(_headers(scope)) if is_generation else NoTrace()
        request = RequestInHand(request_id, trace, time.monotonic(), self._logged == "prompts")
        if is_generation:
            request.notes["http.route"] = scope["path"]
        begin(request)
        return request

    def end(self, request: RequestInHand, status: int) -> None:
        """Ends a request's trace and logs it. status: of the answer's head; 0 = none was sent."""
        if "http.route" not in request.notes:
            return
        request.notes["http.response.status_code"] = status
        # A prompt is a log's, at most: traces go to others.
        prompt = request.notes.pop("loraplex.prompt", None)
        request.trace.end(request.name, request.notes, request.error)
        if self._logged != "no":
            _log(request, {} if prompt is None else {"loraplex.prompt": prompt})


def note_call(request: RequestInHand, call: GenerationCall, tenant: str, base_name: str) -> None:
    """Note the caller's wishes; no more of the prompt than the operator wants."""
    sampling = call.sampling
    request.notes |= {
        "gen_ai.operation.name": _operation(call),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": base_name if call.adapter is None else call.adapter.adapter_id,
        "gen_ai.response.model": base_name,
        "gen_ai.request.choice.count": call.n,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "loraplex.request.id": request.request_id,
    }
    if tenant:
        request.notes["loraplex.tenant"] = tenant
    if call.max_tokens is not None:
        request.notes["gen_ai.request.max_tokens"] = call.max_tokens
    if request.keeps_prompts:
        asked = call.prompts if call.messages is None else bare(call.messages)
        request.notes["loraplex.prompt"] = json.dumps(asked, default=str)[:MAX_PROMPT_CHARS]


def _operation(call: GenerationCall) -> str:
    if call.vector is not None:  # of the others OpenTelemetry has no name
        return "embeddings" if call.vector.use == "vector" else call.api
    return "text_completion" if call.messages is None else "chat"


def _log(request: RequestInHand, more: Mapping[str, Value]) -> None:
    trace_id = request.trace.trace_id
    facts: dict[str, Any] = {
        **request.notes,
        **more,
        "loraplex.duration_s": round(time.monotonic() - request.began, 6),
        **({} if request.error is None else {"error.type": request.error}),
        **({} if trace_id is None else {"trace_id": trace_id}),
    }
    text = " ".join(f"{name}={value}" for name, value in facts.items())
    logger.info("request %s: %s", request.request_id, text, extra={"facts": facts})


def _headers(scope: Scope) -> dict[str, str]:
    """The headers of W3C's trace context, as the propagator wants them."""
    wanted = (b"traceparent", b"tracestate")
    return {
        name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in wanted
    }
