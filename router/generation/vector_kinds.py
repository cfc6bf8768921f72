"""Whether the base gives what a call wants: text, or vectors. Pure."""

from router.call import GenerationCall, RequestError, adapter_field
from server.protocol import ModelCard


def check_kind(call: GenerationCall, card: ModelCard) -> None:
    """Raises RequestError (unsupported), with the routes that the base does serve."""
    if call.vector is None and not card.writes:
        raise _refused(call, card, "writes no text")
    if call.vector is not None and card.vectors is None:
        raise _refused(call, card, "gives no vectors")


def _refused(call: GenerationCall, card: ModelCard, lack: str) -> RequestError:
    served = "it is for vectors: use /v1/embeddings" if card.vectors else "it is a classifier"
    message = f"the model {card.names[0]} {lack}; {served}"
    return RequestError("unsupported", message, param=adapter_field(call.api))
