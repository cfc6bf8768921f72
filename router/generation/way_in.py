"""A generation request on its way in, as the value of each step."""

from collections.abc import Callable

import msgspec

from loraplex.router.api.request.formatter import ApiLimits, ApiRequest
from loraplex.router.call import AdapterChoice, AnswerHead, GenerationCall, MergedChoice
from loraplex.router.names.served import ServedAdapter
from loraplex.router.policy.queue.queue_limits import Promise
from loraplex.router.tenancy.keys import Caller
from loraplex.router.text.model import TextModel

# `parse` of an API's module: body, limits, the value of `Authorization: Bearer …`.
Parse = Callable[[bytes, ApiLimits, str | None], ApiRequest]


class ArrivedRequest(msgspec.Struct, frozen=True):
    """A request whose body is here. parse: of its API. bearer: for sources of adapters; None =
    there is none, or it is a key. session: the caller's, which had better run on one worker; "" =
    none.
    """

    request_id: str
    caller: Caller
    body: bytes
    parse: Parse
    bearer: str | None = None
    session: str = ""


class AuthorisedRequest(msgspec.Struct, frozen=True):
    """A request that its caller may make. adapter: as this caller has it. session: as it came."""

    request_id: str
    caller: Caller
    call: GenerationCall
    adapter: AdapterChoice | MergedChoice | None
    session: str = ""

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def priority(self) -> int:
        """Priority of the request: lower goes first."""
        return self.caller.priority + self.call.priority


class ResolvedRequest(msgspec.Struct, frozen=True):
    """The present meaning of a request's names.

    adapter: None = the base. model: as it is under the adapter.
    """

    model: TextModel
    adapter: ServedAdapter | None

    @classmethod
    def of(cls, model: TextModel, adapter: ServedAdapter | None) -> "ResolvedRequest":
        """A resolved request; its model has the adapter's classes. model: of the base."""
        classes = None if adapter is None else adapter.manifest.classes
        return cls(model if classes is None else model.under(classes), adapter)

    @property
    def digest(self) -> str | None:
        """Digest of the adapter; None for the base."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def acting(self) -> str | None:
        """Adapter that acts, as in `GenerateRequest.acting`."""
        return None if self.adapter is None else self.adapter.acting


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that may run. head: of its answer. room: in the queue, for all its sequences."""

    head: AnswerHead
    room: Promise
