"""The console: static files next to this module, served with a strict content security policy.

They hold no data; what the page shows it asks of the API, with the keys that its user types.
"""

import hashlib
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from loraplex.router.call import RequestError

FOLDER = Path(__file__).parents[1] / "console"
PAGE = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no HTML made of strings.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _File(msgspec.Struct, frozen=True):
    body: bytes
    headers: dict[str, str]


class ConsoleRoutes:
    """Reads the files once; only those that lie in the folder then are ever served."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES
        }

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/console", self._page, methods=["GET"]),
            Route("/console/", self._to_page, methods=["GET"]),
            Route("/console/{file}", self._file, methods=["GET"]),
        ]

    async def _page(self, request: Request) -> Response:
        return _answer(request, self._files[PAGE])

    async def _to_page(self, request: Request) -> Response:
        return RedirectResponse("../console", 308)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        file = self._files.get(name)
        if file is None or name == PAGE:
            raise RequestError("route_not_found", f"the console has no file {name[:100]!r}")
        return _answer(request, file)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(body, {**_HEADERS, "content-type": _TYPES[path.suffix], "etag": etag})


def _answer(request: Request, file: _File) -> Response:
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.body, headers=file.headers)
