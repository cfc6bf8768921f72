"""The wire contract between router and worker: typed msgpack frames over one WebSocket. Pure.

Frames are msgspec structs encoded as tagged arrays: small, bounded, without object deserialisation.
New fields go at the end, with a default. One WebSocket message carries one frame.
"""

from server.protocol.adapters import (
    AdapterLoad,
    AdapterMerge,
    AdapterOrder,
    AdapterPins,
    AdapterPrefetch,
    AdapterReport,
    AdapterState,
    AdapterTiers,
    LoadStage,
    MemberSource,
    OrderAction,
    TierState,
)
from server.protocol.card import ClassForm, Gift, ModelCard, PairForm, VectorForm
from server.protocol.frames import (
    MAX_FRAME_BYTES,
    RouterFrame,
    WorkerFrame,
    decode_router_frame,
    decode_worker_frame,
    encode,
)
from server.protocol.generation import (
    BACKGROUND_PRIORITY,
    Abort,
    ErrorCode,
    Finish,
    GenerateRequest,
    Pooling,
    StepEvents,
    TokenEvent,
    TokenLogprob,
    VectorKind,
    VectorParams,
    acting,
)
from server.protocol.sampling import SamplingParams
from server.protocol.workers import (
    PROTOCOL_VERSION,
    AdapterPlace,
    Inspect,
    RouterHello,
    WorkerHello,
    WorkerPicture,
    WorkerStatus,
)

__all__ = [
    "BACKGROUND_PRIORITY",
    "Abort",
    "AdapterLoad",
    "AdapterMerge",
    "AdapterOrder",
    "AdapterPins",
    "AdapterPlace",
    "AdapterPrefetch",
    "AdapterReport",
    "AdapterState",
    "AdapterTiers",
    "ClassForm",
    "ErrorCode",
    "Finish",
    "GenerateRequest",
    "Gift",
    "Inspect",
    "LoadStage",
    "MAX_FRAME_BYTES",
    "MemberSource",
    "ModelCard",
    "OrderAction",
    "PROTOCOL_VERSION",
    "PairForm",
    "Pooling",
    "RouterFrame",
    "RouterHello",
    "SamplingParams",
    "StepEvents",
    "TierState",
    "TokenEvent",
    "TokenLogprob",
    "VectorForm",
    "VectorKind",
    "VectorParams",
    "WorkerFrame",
    "WorkerHello",
    "WorkerPicture",
    "WorkerStatus",
    "acting",
    "decode_router_frame",
    "decode_worker_frame",
    "encode",
]
