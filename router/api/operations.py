"""The API's operations: bodies, answers and the key of each. Pure."""

from typing import Any, Literal

import msgspec

from loraplex.router.api.about import (
    Health,
    Info,
    LoadedAdapters,
    ModelList,
    ModelObject,
    ServedModel,
    ServedSettings,
    VersionAnswer,
)
from loraplex.router.api.admin.adapters import (
    AdapterHistory,
    AdapterList,
    AdapterObject,
    Deleted,
    DigestBody,
    LoadLoraBody,
    Refreshed,
    RegisterBody,
    RolloutBody,
    RolloutObject,
    SagemakerAdapters,
    SagemakerBody,
    SglangLoadBody,
    UnloadBody,
    UnloadLoraBody,
)
from loraplex.router.api.admin.fleet import FleetObject
from loraplex.router.api.admin.keys import QUERY as BUCKET_QUERY
from loraplex.router.api.admin.keys import (
    AuditList,
    ChangeKeyBody,
    CompletionsPage,
    CostPage,
    CreateKeyBody,
    DeletedKey,
    KeyList,
    KeyObject,
    NewKeyObject,
    RecordList,
    RotateKeyBody,
    UsageList,
)
from loraplex.router.api.admin.pages import LIST_QUERY
from loraplex.router.api.admin.uploads import UPLOAD_QUERY, AdapterFiles, Uploaded
from loraplex.router.api.cohere_chat import CohereChat, CohereChatBody, CohereEvent
from loraplex.router.api.errors import Dialect, dialect_of_path
from loraplex.router.api.feedback import FeedbackBody, FeedbackObject
from loraplex.router.api.files_and_batches import (
    BatchList,
    BatchObject,
    CreateBatchBody,
    DeletedFile,
    FileList,
    FileObject,
    UploadForm,
)
from loraplex.router.api.lorax.generated import GenerateAnswer, StreamAnswer
from loraplex.router.api.lorax.request import LoraxBody
from loraplex.router.api.messages.blocks import MessageEvent, MessageObject
from loraplex.router.api.messages.request import CountTokensBody, MessagesBody, TokenCount
from loraplex.router.api.openai.chat import BatchChatBody, ChatBody, ChatChunk, ChatCompletion
from loraplex.router.api.openai.completions import Completion, CompletionsBody
from loraplex.router.api.responses.items import ResponseEvent, ResponseObject
from loraplex.router.api.responses.request import ResponsesBody
from loraplex.router.api.responses.stored import DeletedResponse, InputItemList
from loraplex.router.api.sglang.generate import AbortBody, SglangAnswer, SglangBody
from loraplex.router.api.sglang.lmdeploy import LmdeployAnswer, LmdeployBody
from loraplex.router.api.tokenize import (
    DetokenizeBody,
    DetokenizedText,
    TokenizeBody,
    TokenizeChatBody,
    TokenizedPrompt,
    TokenizePromptBody,
    TokenizerInfo,
    TokenObject,
)
from loraplex.router.api.vectors.cohere import CohereEmbedBody, CohereEmbeddings
from loraplex.router.api.vectors.embed import EmbedBody, LoraxEmbedding
from loraplex.router.api.vectors.fits import (
    LabelScoreBody,
    LabelScores,
    RerankAnswer,
    RerankBody,
    ScoreBody,
    ScoreList,
    TeiRank,
    TeiRerankBody,
)
from loraplex.router.api.vectors.pooled import (
    ClassifyBody,
    ClassList,
    EmbeddingList,
    EmbeddingsBody,
    LabelScore,
    LoraxClassifyBatchBody,
    LoraxClassifyBody,
    PoolingBody,
    PoolingList,
)
from loraplex.router.api.vllm.control import PAUSE_QUERY, IsPaused, PauseState, WorldSize
from loraplex.router.api.vllm.tokens import TokensAnswer, TokensBody

Method = Literal["get", "post", "put", "patch", "delete"]


class Operation(msgspec.Struct, frozen=True):
    """A route. requests: types that its body may have. answers, events: types of the JSON body and
    of a stream's events.

    text: the answer is plain text. other_dialect: another shape that its errors may have. admin: it
    wants the admin key. key: it wants a caller's key where callers have keys. accepted: it may
    answer 202 with the same body, for what goes on. may_be_empty: the body. status: of success, or
    of all that it ever answers.
    done: a stream ends with OpenAI's `[DONE]`. media: of the body. in_batches: lines may ask it.
    """

    path: str
    method: Method
    summary: str
    other_dialect: Dialect | None = None
    requests: tuple[Any, ...] = ()
    answers: tuple[Any, ...] = ()
    events: tuple[Any, ...] = ()
    done: bool = False
    may_be_empty: bool = False
    text: bool = False
    admin: bool = False
    accepted: bool = False
    key: bool = False
    status: int = 200
    query: tuple[str, ...] = ()
    media: str = "application/json"
    in_batches: bool = True

    @property
    def dialect(self) -> Dialect:
        """The shape of its errors."""
        return dialect_of_path(self.path)


def _admin(
    path: str,
    method: Method,
    summary: str,
    answer: Any,
    request: Any = None,
) -> Operation:
    return Operation(
        path=path,
        method=method,
        summary=summary,
        requests=() if request is None else (request,),
        answers=() if answer is str else (answer,),
        text=answer is str,
        admin=True,
        accepted=path.endswith("/unload"),
        may_be_empty=request in (UnloadBody, RotateKeyBody, CreateKeyBody, DigestBody),
    )


def _post(
    path: str, summary: str, request: Any, answer: Any = None, event: Any = None, done: bool = False
) -> Operation:
    """A route that callers post to."""
    return Operation(
        path,
        "post",
        summary,
        requests=(request,),
        answers=() if answer is None else (answer,),
        events=() if event is None else (event,),
        done=done,
    )


def _keyed(path: str, summary: str, answer: Any, *query: str) -> Operation:
    """A route that any caller with a key may read."""
    return Operation(path, "get", summary, answers=(answer,), key=True, query=query)


_KEY = "/v1/keys/{id}"
_KEYS = (
    _admin("/v1/keys", "get", "Keys of callers", KeyList),
    msgspec.structs.replace(
        _admin(
            "/v1/keys", "post", "Make a key; only this answer shows it", NewKeyObject, CreateKeyBody
        ),
        status=201,
    ),
    _admin(_KEY, "get", "One of them", KeyObject),
    _admin(_KEY, "patch", "Change what it opens, its limits or its end", KeyObject, ChangeKeyBody),
    _admin(_KEY, "delete", "Delete it", DeletedKey),
    _admin(f"{_KEY}/rotate", "post", "Another key in its place", NewKeyObject, RotateKeyBody),
    _admin(f"{_KEY}/block", "post", "It opens nothing for now", KeyObject),
    _admin(f"{_KEY}/unblock", "post", "It opens again what it opened", KeyObject),
    _keyed("/v1/usage", "What was used", UsageList, "start", "end", "tenant", "key", "adapter"),
    _keyed("/v1/usage/requests", "Latest requests", RecordList, "limit", "tenant"),
    _keyed("/v1/organization/costs", "Costs by day (OpenAI)", CostPage, *BUCKET_QUERY),
    _keyed(
        "/v1/organization/usage/completions",
        "Usage by day (OpenAI)",
        CompletionsPage,
        *BUCKET_QUERY,
    ),
    msgspec.structs.replace(
        _admin("/v1/audit", "get", "What operators did", AuditList), query=("limit",)
    ),
)
_ONE = "/v1/adapters/{name}"
_NAMED = (
    msgspec.structs.replace(
        _admin("/v1/adapters", "get", "Registered adapters, by tier and worker", AdapterList),
        query=LIST_QUERY,
    ),
    _admin(_ONE, "get", "One of them", AdapterObject),
    _admin(_ONE, "delete", "Delete it: requests that name it get 410", Deleted),
    msgspec.structs.replace(
        _admin(_ONE, "put", "Upload it: files as a tar or a form", Uploaded, AdapterFiles),
        media="multipart/form-data",
        query=UPLOAD_QUERY,
    ),
    _admin(f"{_ONE}/load", "post", "To every worker's device, and into service", AdapterObject),
    _admin(f"{_ONE}/pin", "post", "The same; and there it stays", AdapterObject),
    _admin(f"{_ONE}/unpin", "post", "It may be evicted again", AdapterObject),
    _admin(
        path=f"{_ONE}/unload",
        method="post",
        summary="Out of service; freed when running requests are over",
        answer=AdapterObject,
        request=UnloadBody,
    ),
    _admin(f"{_ONE}/refresh", "post", "Resolve its reference again", Refreshed),
    _admin(f"{_ONE}/rollout", "get", "Its versions, and how they do", RolloutObject),
    _admin(f"{_ONE}/rollout", "post", "Set versions and their weights", AdapterObject, RolloutBody),
    _admin(f"{_ONE}/rollout", "delete", "End it: the old version has everything", AdapterObject),
    _admin(f"{_ONE}/promote", "post", "The name means this version", AdapterObject, DigestBody),
    _admin(f"{_ONE}/rollback", "post", "Back to the version before", AdapterObject, DigestBody),
    _admin(f"{_ONE}/history", "get", "What it meant, newest first", AdapterHistory),
)
_LIFECYCLE = (
    *(
        msgspec.structs.replace(operation, query=operation.query or ("tenant",))
        for operation in _NAMED
    ),
    _admin("/v1/adapters", "post", "Register an adapter", AdapterObject, RegisterBody),
    _admin("/v1/load_lora_adapter", "post", "Register and load (vLLM)", str, LoadLoraBody),
    _admin("/v1/unload_lora_adapter", "post", "Unload and delete (vLLM)", str, UnloadLoraBody),
    _admin(
        "/load_lora_adapter", "post", "Register and load (SGLang)", LoadedAdapters, SglangLoadBody
    ),
    _admin(
        "/unload_lora_adapter", "post", "Unload and delete (SGLang)", LoadedAdapters, UnloadLoraBody
    ),
    _admin("/adapters", "post", "Register and load (SageMaker)", str, SagemakerBody),
    *(
        msgspec.structs.replace(operation, query=("tenant",))
        for operation in (
            _admin("/adapters", "get", "Registered adapters (SageMaker)", SagemakerAdapters),
            _admin("/adapters/{name}", "delete", "Unload and delete (SageMaker)", str),
        )
    ),
)
_FILE = "/v1/files/{id}"
_BATCH = "/v1/batches/{id}"
_PAGE = ("after", "limit")
_FILES = (
    msgspec.structs.replace(
        _post("/v1/files", "Store a file of lines for a batch (OpenAI)", UploadForm, FileObject),
        media="multipart/form-data",
        in_batches=False,
    ),
    _keyed("/v1/files", "The tenant's files", FileList, *_PAGE, "order", "purpose"),
    _keyed(_FILE, "One of them", FileObject),
    Operation(_FILE, "delete", "Delete it", answers=(DeletedFile,), key=True),
    Operation(f"{_FILE}/content", "get", "What is in it", text=True, key=True),
    msgspec.structs.replace(
        _post("/v1/batches", "Run the lines of a file (OpenAI)", CreateBatchBody, BatchObject),
        in_batches=False,
    ),
    _keyed("/v1/batches", "The tenant's batches", BatchList, *_PAGE),
    _keyed(_BATCH, "One of them", BatchObject),
    Operation(f"{_BATCH}/cancel", "post", "End it early", answers=(BatchObject,), key=True),
)
_FEEDBACK = msgspec.structs.replace(
    _post("/v1/feedback", "Say how good an answer was", FeedbackBody, FeedbackObject),
    in_batches=False,
)
_RESPONSE = "/v1/responses/{id}"
_RESPONSES = (
    _keyed(_RESPONSE, "A stored answer", ResponseObject),
    Operation(_RESPONSE, "delete", "Delete it", answers=(DeletedResponse,), key=True),
    Operation(f"{_RESPONSE}/cancel", "post", "End it early", answers=(ResponseObject,), key=True),
    _keyed(f"{_RESPONSE}/input_items", "Its input", InputItemList, *_PAGE, "order"),
)
_BOTH: tuple[Method, ...] = ("get", "post")
OPERATIONS: tuple[Operation, ...] = (
    _post(
        "/",
        "Generate, whole (a list of one) or streamed, as `stream` says",
        LoraxBody,
        list[GenerateAnswer],
        StreamAnswer,
    ),
    Operation("/", "get", "Whether requests can be answered"),
    Operation(
        "/generate",
        "post",
        "Generate, in LoRAX's shape, SGLang's or LMDeploy's",
        other_dialect="openai",
        requests=(LoraxBody, SglangBody, LmdeployBody),
        answers=(GenerateAnswer, SglangAnswer, list[SglangAnswer], LmdeployAnswer),
        events=(SglangAnswer, LmdeployAnswer),
        done=True,
    ),
    _post("/generate_stream", "Generate, token by token", LoraxBody, event=StreamAnswer),
    _post(
        "/v1/completions",
        "Complete texts (OpenAI)",
        CompletionsBody,
        Completion,
        Completion,
        done=True,
    ),
    _post(
        "/v1/chat/completions",
        "Answer a conversation (OpenAI)",
        ChatBody,
        ChatCompletion,
        ChatChunk,
        done=True,
    ),
    _post(
        "/v1/chat/completions/batch",
        "Answer several conversations (vLLM)",
        BatchChatBody,
        ChatCompletion,
    ),
    _post(
        "/inference/v1/generate",
        "Go on with token ids (vLLM)",
        TokensBody,
        TokensAnswer,
        TokensAnswer,
        done=True,
    ),
    _post(
        "/v1/responses",
        "Answer items (OpenAI)",
        ResponsesBody,
        ResponseObject,
        ResponseEvent,
    ),
    *_RESPONSES,
    _post(
        "/v1/messages",
        "Answer a conversation (Anthropic)",
        MessagesBody,
        MessageObject,
        MessageEvent,
    ),
    *(
        _post(path, "Answer a conversation (Cohere)", CohereChatBody, CohereChat, CohereEvent, True)
        for path in ("/v2/chat", "/cohere/v2/chat")
    ),
    _post("/v1/messages/count_tokens", "The tokens of its prompt", CountTokensBody, TokenCount),
    Operation(
        "/invocations",
        "post",
        "An answer or numbers, as the body says (SageMaker)",
        other_dialect="openai",
        requests=(
            *(LoraxBody, CompletionsBody, ChatBody, EmbeddingsBody),
            *(ClassifyBody, PoolingBody, ScoreBody, RerankBody),
        ),
        answers=(
            *(list[GenerateAnswer], Completion, ChatCompletion, EmbeddingList, ClassList),
            *(PoolingList, ScoreList, RerankAnswer),
        ),
        events=(StreamAnswer, Completion, ChatChunk),
        done=True,
    ),
    _post("/v1/embeddings", "Vectors of texts (OpenAI)", EmbeddingsBody, EmbeddingList),
    msgspec.structs.replace(
        _post("/embed", "Vectors of texts, in LoRAX's shape or TEI's", EmbedBody, LoraxEmbedding),
        answers=(LoraxEmbedding, list[list[float]]),
    ),
    Operation(
        "/classify",
        "post",
        "Classes of texts, in vLLM's shape or LoRAX's",
        other_dialect="lorax",
        requests=(ClassifyBody, LoraxClassifyBody),
        answers=(ClassList, list[LabelScore]),
    ),
    _post("/pooling", "Vectors or classes of texts (vLLM)", PoolingBody, PoolingList),
    _post("/v2/embed", "Vectors of texts (Cohere)", CohereEmbedBody, CohereEmbeddings),
    _post("/classify_batch", "The same (LoRAX)", LoraxClassifyBatchBody, list[list[LabelScore]]),
    *(
        Operation(
            path,
            "post",
            "How well documents fit queries (vLLM), or tokens follow items (SGLang)",
            requests=(ScoreBody, LabelScoreBody),
            answers=(ScoreList, LabelScores),
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation(
            path,
            "post",
            "Documents by how well they fit a query, in the shape of Cohere, Jina, vLLM or TEI",
            other_dialect="lorax",
            requests=(RerankBody, TeiRerankBody),
            answers=(RerankAnswer, list[TeiRank]),
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    _keyed("/v1/models", "The base and registered adapters", ModelList),
    _keyed("/v1/models/{name}", "One of them", ModelObject),
    *_FILES,
    _FEEDBACK,
    *_KEYS,
    *_LIFECYCLE,
    Operation(
        "/v1/fleet",
        "get",
        "Workers, arenas, queue and errors, at once or followed",
        answers=(FleetObject,),
        events=(FleetObject,),
        admin=True,
    ),
    Operation(
        "/tokenize",
        "post",
        "The tokens of a text or of a chat",
        other_dialect="openai",
        requests=(TokenizeBody, TokenizePromptBody, TokenizeChatBody),
        answers=(list[TokenObject], TokenizedPrompt),
    ),
    _post("/v1/chat/completions/render", "A chat's prompt (vLLM)", ChatBody, dict[str, Any]),
    _post("/v1/completions/render", "Prompts (vLLM)", CompletionsBody, list[dict[str, Any]]),
    _post("/detokenize", "The text of tokens", DetokenizeBody, DetokenizedText),
    _keyed("/tokenizer_info", "What the base's tokenizer has", TokenizerInfo),
    Operation("/info", "get", "The model and the limits", answers=(Info,)),
    Operation("/version", "get", "The router's version", answers=(VersionAnswer,)),
    Operation("/health", "get", "Whether requests can be answered"),
    Operation("/ping", "get", "Whether requests can be answered"),
    Operation("/ping", "post", "Whether requests can be answered"),
    Operation("/health/live", "get", "Whether the process answers", answers=(Health,)),
    Operation("/health/ready", "get", "Whether requests can be answered", answers=(Health,)),
    Operation("/health_generate", "get", "Whether requests can be answered (SGLang)"),
    *(
        Operation(path, "get", "The model (SGLang)", answers=(ServedModel,))
        for path in ("/model_info", "/get_model_info")
    ),
    *(
        Operation(path, "get", "The server (SGLang, vLLM)", answers=(ServedSettings,))
        for path in ("/server_info", "/get_server_info")
    ),
    msgspec.structs.replace(
        _admin("/pause", "post", "Hold new sequences (vLLM)", PauseState), query=PAUSE_QUERY
    ),
    _admin("/resume", "post", "Hold them no more (vLLM)", PauseState),
    _admin("/is_paused", "get", "Whether they are held (vLLM)", IsPaused),
    Operation("/get_world_size", "get", "GPUs of a worker (vLLM)", answers=(WorldSize,)),
    _post("/abort_request", "End requests of the caller's tenant (SGLang)", AbortBody),
    *(
        Operation("/flush_cache", method, "Why nothing is flushed (SGLang)", key=True, status=400)
        for method in _BOTH
    ),
    Operation("/metrics", "get", "Prometheus metrics", text=True),
    Operation("/openapi.json", "get", "This description", answers=(dict[str, Any],)),
)
