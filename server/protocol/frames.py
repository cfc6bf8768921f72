"""Encodes and decodes all frames. Pure."""

import msgspec

from loraplex.server.protocol.adapters import (
    AdapterLoad,
    AdapterMerge,
    AdapterOrder,
    AdapterPins,
    AdapterPrefetch,
    AdapterReport,
    AdapterState,
)
from loraplex.server.protocol.generation import Abort, GenerateRequest, StepEvents
from loraplex.server.protocol.workers import (
    Inspect,
    PicturesMissing,
    RouterHello,
    WorkerHello,
    WorkerPicture,
    WorkerStatus,
)

MAX_FRAME_BYTES = 16 << 20

RouterFrame = (
    RouterHello
    | GenerateRequest
    | Abort
    | AdapterLoad
    | AdapterMerge
    | AdapterPins
    | AdapterOrder
    | AdapterPrefetch
    | Inspect
)
WorkerFrame = (
    WorkerHello
    | StepEvents
    | AdapterState
    | WorkerStatus
    | AdapterReport
    | WorkerPicture
    | PicturesMissing
)

encode = msgspec.msgpack.Encoder().encode
decode_router_frame = msgspec.msgpack.Decoder(RouterFrame).decode
decode_worker_frame = msgspec.msgpack.Decoder(WorkerFrame).decode
