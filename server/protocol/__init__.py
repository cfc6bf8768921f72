"""The wire contract between router and worker: typed msgpack frames over one WebSocket. Pure.

Frames are msgspec structs encoded as tagged arrays: small, bounded, without object deserialisation.
New fields go at the end, with a default. One WebSocket message carries one frame. All names below
are for others to import.
"""

from loraplex.server.protocol.adapters import (
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
from loraplex.server.protocol.frames import (
    MAX_FRAME_BYTES,
    RouterFrame,
    WorkerFrame,
    decode_router_frame,
    decode_worker_frame,
    encode,
)
from loraplex.server.protocol.generation import (
    BACKGROUND_PRIORITY,
    Abort,
    DeviceCost,
    ErrorCode,
    Evidence,
    Finish,
    GenerateRequest,
    NamesOnce,
    Pooling,
    RoutedExperts,
    RoutingForm,
    SamplingParams,
    StepEvents,
    TextPooling,
    ThinkingBudget,
    TokenEvent,
    TokenLogprob,
    VectorKind,
    VectorParams,
    acting,
)
from loraplex.server.protocol.picture_files import (
    MAX_PICTURE_BYTES,
    MAX_PICTURE_PIXELS,
    PictureFault,
    PictureHead,
    read_picture_head,
)
from loraplex.server.protocol.pictures import (
    UNBOUNDED,
    AnyForm,
    Grid,
    PatchRule,
    PictureForm,
    PictureSpan,
    PixelBounds,
    StretchedForm,
    TiledForm,
    TileRule,
    VisionCard,
)
from loraplex.server.protocol.workers import (
    PROTOCOL_VERSION,
    AdapterPlace,
    ClassForm,
    Gift,
    Inspect,
    ModelCard,
    PairForm,
    PicturesMissing,
    RouterHello,
    VectorForm,
    WorkerHello,
    WorkerPicture,
    WorkerStatus,
)
