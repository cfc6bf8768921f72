"""The routes that give vectors: each finds the shape of a body, and `Answerer` does the rest."""

from starlette.requests import Request
from starlette.responses import Response

from router.api.vectors import embed, embeddings
from router.generation.way_in import Parse
from router.routes.generate import answered
from router.routes.operator import Endpoint
from router.service import Service


class VectorRoutes:
    """Each endpoint answers one route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.embeddings = self._fixed(embeddings.parse)
        self.embed = self._fixed(embed.parse)

    def _fixed(self, parse: Parse) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await answered(self._service, request, parse)

        return endpoint
