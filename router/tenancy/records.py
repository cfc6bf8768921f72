"""The record of an operator's action. Pure."""

import msgspec


class AuditRecord(msgspec.Struct, frozen=True):
    """An operator's action, for the audit log. at: Unix seconds. remote: the address that asked.
    status: how it was answered.
    """

    at: float
    action: str
    target: str
    tenant: str
    status: int
    remote: str
    request_id: str
