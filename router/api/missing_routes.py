"""Routes of other servers that the router lacks, each with its replacement. Pure."""

_HERE = {
    "/load": "GET /metrics shows what runs and waits",
    "/get_load": "GET /metrics shows what runs and waits",
    "/docs": "GET /openapi.json describes the routes",
    "/redoc": "GET /openapi.json describes the routes",
    "/models": "GET /v1/models lists them",
    "/chat/completions": "POST /v1/chat/completions does it",
    "/completions": "POST /v1/completions does it",
    "/responses": "POST /v1/responses does it",
    "/messages": "POST /v1/messages does it",
    "/embeddings": "POST /v1/embeddings does it",
    "/v1/classify": "POST /classify does it",
    "/predict": "POST /classify does it",
    "/files": "POST /v1/files does it",
    "/batches": "POST /v1/batches does it",
    "/v1/tokenize": "POST /tokenize does it",
    "/v1/detokenize": "POST /detokenize does it",
    "/v1/embed": "POST /v2/embed does it",
    "/inference/v1/generate": "POST /v1/completions takes token ids",
    "/generative_scoring": "POST /v1/score and POST /v1/completions with `logprob_token_ids` do it",
    "/reset_prefix_cache": "no cache has to be emptied: each is keyed by content",
}
_NOT_SERVED = {
    **dict.fromkeys(("/v1/audio/speech", "/v1/audio/transcriptions"), "audio"),
    "/v1/images/generations": "images",
    "/v1/moderations": "moderations",
}


def hint(path: str) -> str | None:
    """What the answer to a request for it says; None for a path that nobody has."""
    wanted = path.rstrip("/")
    if wanted in _NOT_SERVED:
        return f"this server has no {_NOT_SERVED[wanted]}"
    return _HERE.get(wanted)
