"""Whether a model gives what a call wants: text, vectors, classes or fits. Pure."""

from loraplex.router.call import GenerationCall, RequestError, adapter_field
from loraplex.router.names.served import ServedAdapter
from loraplex.server.protocol import Gift, ModelCard

_AT: dict[Gift, str] = {
    "text": "text at /v1/chat/completions",
    "vectors": "vectors at /v1/embeddings",
    "classes": "classes at /classify",
    "fits": "scores of documents at /v1/rerank",
}
# What an adapter with a score head makes a model give.
_OF_HEADS: tuple[Gift, ...] = ("classes", "fits")
_NO: dict[Gift, str] = {
    "text": "no text",
    "vectors": "no vectors",
    "classes": "no classes",
    "fits": "no scores of documents",
}


def check_early(call: GenerationCall, card: ModelCard) -> None:
    """Checks a call as `check_kind`, before its adapter is known: that may have a score head."""
    if call.adapter is None or _wanted(call) not in _OF_HEADS:
        check_kind(call, card, None)


def check_kind(call: GenerationCall, card: ModelCard, adapter: ServedAdapter | None) -> None:
    """Checks that the model gives the kind of answer that a call wants. card: of the model under
    the adapter. Raises RequestError (unsupported), with the routes that it does serve.
    """
    wanted = _wanted(call)
    if wanted in card.gives:
        return
    served = ", ".join(_AT[gift] for gift in card.gives)
    name = f"the model {card.names[0]}"
    if adapter is not None:
        head = "no" if adapter.manifest.classes is None else "a"
        name += f" with the adapter {adapter.adapter_id}, which has {head} score head,"
    message = f"{name} gives {_NO[wanted]}; it gives {served}"
    if wanted == "fits" and card.classes is not None:
        message += f"; such a score needs a classifier of one label, not {len(card.classes.labels)}"
    elif wanted == "fits":
        message += "; the worker's --rerank-tokens and --rerank-template say how it gives a score"
    raise RequestError("unsupported", message, param=adapter_field(call.api))


def _wanted(call: GenerationCall) -> Gift:
    if call.vector is None:
        return "text"
    wanted: dict[str, Gift] = {"vector": "vectors", "classes": "classes", "fit": "fits"}
    return wanted[call.vector.use]
