"""Whether the base gives what a call wants: text, vectors, classes or fits. Pure."""

from router.call import GenerationCall, RequestError, adapter_field
from server.protocol import ModelCard

_ROUTES = {
    "text": "/v1/chat/completions",
    "vectors": "/v1/embeddings",
    "classes": "/classify",
    "scores of a document": "/v1/rerank",
}


def check_kind(call: GenerationCall, card: ModelCard) -> None:
    """Raises RequestError (unsupported), with the routes that the base does serve."""
    given = {
        "text": card.writes,
        "vectors": card.vectors is not None,
        "classes": card.classes is not None,
        "scores of a document": card.pairs is not None,
    }
    wanted = _wanted(call)
    if given[wanted]:
        return
    served = [f"{what} at {_ROUTES[what]}" for what, is_given in given.items() if is_given]
    message = f"the model {card.names[0]} gives no {wanted}; it gives {', '.join(served)}"
    if wanted == "scores of a document" and card.classes is not None:
        message += f"; such a score needs a classifier of one label, not {len(card.classes.labels)}"
    elif wanted == "scores of a document":
        message += "; the worker's --rerank-tokens and --rerank-template say how it gives a score"
    raise RequestError("unsupported", message, param=adapter_field(call.api))


def _wanted(call: GenerationCall) -> str:
    if call.vector is None:
        return "text"
    if call.vector.use == "vector":
        return "vectors"
    return "classes" if call.vector.use == "classes" else "scores of a document"
