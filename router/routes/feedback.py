"""`/v1/feedback`: how good an answer was, said by its caller."""

from starlette.requests import Request
from starlette.responses import Response

from loraplex.router.api.feedback import feedback_object, parse_feedback
from loraplex.router.http.body import BodyLimits, read_json_body
from loraplex.router.routes.info import json_response
from loraplex.router.routes.operator import MAX_BODY_BYTES
from loraplex.router.service import Service


class FeedbackRoute:
    """Callers need a key where generations need one."""

    def __init__(self, service: Service) -> None:
        self._tenancy = service.tenancy
        self._feedback = service.feedback
        self._body_limits = BodyLimits(MAX_BODY_BYTES, service.config.body_timeout_s)

    async def answer(self, request: Request) -> Response:
        """Takes one score. Raises RequestError, StoreDown."""
        caller = await self._tenancy.identify(request.headers.get("authorization"))
        said = parse_feedback(await read_json_body(request, self._body_limits))
        counted = await self._feedback.take(caller, said.request_id, said.score)
        return json_response(feedback_object(said.request_id, counted))
