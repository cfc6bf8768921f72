"""Routes of other servers that the router lacks, each with its replacement. Pure."""

_OPENAI = ("models", "chat/completions", "completions", "responses", "messages", "embeddings")
# Paths that clients of other servers use, and the route that each means.
MEANT = {
    **{f"/{name}": f"/v1/{name}" for name in _OPENAI},
    **{f"/v1/{name}": f"/{name}" for name in ("classify", "tokenize", "detokenize")},
}
_HERE = {
    "/load": "GET /metrics shows what runs and waits",
    "/get_load": "GET /metrics shows what runs and waits",
    "/docs": "GET /openapi.json describes the routes",
    "/redoc": "GET /openapi.json describes the routes",
    "/predict": "POST /classify does it",
    "/files": "POST /v1/files does it",
    "/batches": "POST /v1/batches does it",
    "/api/chat": "POST /v1/chat/completions does it",
    "/api/generate": "POST /v1/completions does it",
    "/api/embed": "POST /v1/embeddings does it",
    "/api/tags": "GET /v1/models lists them",
    "/v1/embed": "POST /v2/embed does it",
    "/generative_scoring": "POST /v1/score and POST /v1/completions with `logprob_token_ids` do it",
    "/reset_prefix_cache": "no cache has to be emptied: each is keyed by content",
}
_NOT_SERVED = {
    **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions"), "audio"),
    "/v1/images/generations": "images",
    "/v1/moderations": "moderations",
}


def hint(path: str) -> str | None:
    """The hint for a missing path; None for a path that nobody has."""
    wanted = path.rstrip("/")
    if wanted in _NOT_SERVED:
        return f"this server has no {_NOT_SERVED[wanted]}"
    return _HERE.get(wanted)
