"""A router's settings: frozen, built once by the launcher, no I/O here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loraplex.adapters.errors import CommandError
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.router.policy.batch_limits import BatchLimits, FilesLimits, ResponsesLimits
from loraplex.router.policy.upload_options import UploadOptions

# The oldest proof of a caller's access that a request is accepted with.
MAX_ADAPTER_TTL_S = 60.0
MAX_ROUTER_PROCESSES = 64


class RouterConfigError(CommandError):
    """The router cannot start with this value; the message names the option."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Fields are options of `loraplex router`."""

    workers: tuple[str, ...] = field(
        default=(),
        metadata={"help": "workers to serve from, e.g. ws://10.0.0.7:8090", "flag": "worker"},
    )
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8080, metadata={"help": "port to listen on (0 = any)"})
    uds: Path | None = field(
        default=None,
        metadata={"help": "path of a Unix socket to listen on, in place of an address and a port"},
    )
    secret: str = field(
        default="", metadata={"help": "shared secret that opens the workers", "secret": True}
    )
    cache_dir: Path = field(
        default=Path("~/.cache/loraplex"), metadata={"help": "where model cards are kept"}
    )
    adapters: tuple[str, ...] = field(
        default=(), metadata={"help": "NAME=REF, a public name for an adapter", "flag": "adapter"}
    )
    check_adapters: Literal["start", "use"] = field(default="start", metadata={"fixed": True})
    adapters_file: Path | None = field(
        default=None,
        metadata={"help": "YAML or JSON file of adapters, followed as it changes"},
    )
    watch_folders: tuple[Path, ...] = field(
        default=(),
        metadata={
            "help": "folder whose sub-folders are adapters by their names, followed as they come,"
            " change and go; workers must have it below an --adapter-root",
            "flag": "watch-folder",
        },
    )
    hub_owners: tuple[str, ...] = field(
        default=(), metadata={"help": "Hub owners whose adapters are allowed (default: all)"}
    )
    default_adapter: str = field(
        default="",
        metadata={
            "help": "name or reference of the adapter of requests that name none; those that name"
            " the base model get the base (default: the base)"
        },
    )
    default_source: Literal["hub", "local", "modelscope"] = field(
        default="hub", metadata={"help": "source of an adapter_id that names none"}
    )
    share_hub_token: bool = field(
        default=False,
        metadata={
            "help": "lend the operator's Hub token (LORAPLEX_HUB_TOKEN, else HF_TOKEN) to callers"
            " who name a Hub adapter without a token"
        },
    )
    adapter_ttl_s: float = field(
        default=30.0,
        metadata={
            "min": 0,
            "max": MAX_ADAPTER_TTL_S,
            "help": "seconds for which a resolved reference, and a caller's access, is trusted",
        },
    )
    adapter_timeout_s: float = field(default=120.0, metadata={"fixed": True})
    max_body_bytes: int = field(
        default=4 << 20, metadata={"min": 1, "help": "largest request body", "unit": "bytes"}
    )
    head_timeout_s: float = field(default=10.0, metadata={"fixed": True})
    body_timeout_s: float = field(default=30.0, metadata={"fixed": True})
    idle_timeout_s: float = field(
        default=75.0,
        metadata={
            "min": 1,
            "help": "how long a connection without a request is kept; more than a proxy in front"
            " keeps its own",
        },
    )
    reader_timeout_s: float = field(default=60.0, metadata={"fixed": True})
    max_queue: int = field(
        default=1024, metadata={"min": 1, "help": "sequences waiting for a worker"}
    )
    max_queue_bytes: int = field(default=256 << 20, metadata={"fixed": True})
    max_tenant_queue: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "help": "sequences of one tenant waiting (default: a share of the queue that leaves"
            " room for others)",
        },
    )
    max_tenant_queue_bytes: int | None = field(default=None, metadata={"fixed": True})
    worker_wait_s: float = field(
        default=10.0,
        metadata={"help": "how long requests wait while no worker takes work, before their 503"},
    )
    tool_format: str = field(
        default="auto",
        metadata={
            "help": "how the base writes calls of tools: a format's name, or auto: by its chat"
            " template"
        },
    )
    unread_tools: Literal["describe", "refuse"] = field(
        default="describe",
        metadata={
            "help": "tools for a model whose chat template reads none: a default text describes"
            " them, or they are refused unless a call is demanded"
        },
    )
    reasoning_format: str = field(
        default="auto",
        metadata={
            "help": "how the base marks its reasoning: a format's name; auto: by the chat template;"
            " none: reasoning is part of the text"
        },
    )
    max_n: int = field(default=8, metadata={"min": 1, "help": "largest n or best_of"})
    max_stop_sequences: int = field(default=16, metadata={"fixed": True})
    max_logprobs: int = field(
        default=20, metadata={"min": 0, "max": 1 << 16, "help": "most alternatives a token"}
    )
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] = field(
        default="raw",
        metadata={
            "help": "logprobs of generated tokens: of the raw logits, or processed: of the"
            " distribution that the draw used"
        },
    )
    request_timeout_s: float = field(
        default=600.0,
        metadata={"min": 0.1, "help": "longest time from a request to its last token"},
    )
    max_stream_buffer: int = field(default=1024, metadata={"fixed": True})
    max_stream_buffer_bytes: int = field(default=8 << 20, metadata={"fixed": True})
    hub_token: str = field(
        default="",
        metadata={
            "help": "Hub credential that opens registered adapters",
            "fallback": "HF_TOKEN",
            "secret": True,
        },
    )
    admin_key: str = field(
        default="",
        metadata={
            "help": "key that opens the operator's routes: /v1/adapters, /v1/keys, …",
            "secret": True,
        },
    )
    auth: Literal["auto", "keys", "none"] = field(
        default="auto",
        metadata={
            "help": "who may use the API: who has a key, or anyone (auto: anyone on a loopback"
            " address without --keys-file, else keys)"
        },
    )
    keys_file: Path | None = field(
        default=None,
        metadata={"help": "YAML or JSON file of keys and tenants, followed as it changes"},
    )
    share_prefixes: bool = field(
        default=False,
        metadata={
            "help": "let tenants share cached prefixes (faster; timing may show who said what)"
        },
    )
    quota_outage: Literal["local-share", "open", "closed"] = field(
        default="local-share",
        metadata={
            "help": "without Redis: count here, against this router's share; do not count; or 503"
        },
    )
    key_outage: Literal["open", "closed"] = field(
        default="open",
        metadata={"help": "without Redis: keys made by API are as they were last known; or 503"},
    )
    idempotency_outage: Literal["open", "closed"] = field(
        default="open",
        metadata={
            "help": "without Redis: an Idempotency-Key holds within this router alone; or 503"
        },
    )
    files_dir: Path | None = field(
        default=None,
        metadata={
            "help": "folder of /v1/files and /v1/batches, which several routers share (default:"
            " they are off)"
        },
    )
    files: FilesLimits = FilesLimits()
    batch: BatchLimits = BatchLimits()
    responses: ResponsesLimits = ResponsesLimits()
    upload: UploadOptions = UploadOptions()
    max_requests: int = field(
        default=4096,
        metadata={"min": 1, "help": "requests being answered at once, streams included"},
    )
    grammar: GrammarLimits = GrammarLimits()
    metrics_adapters: int = field(
        default=100,
        metadata={"help": "registered adapters with metrics of their own: those with most tokens"},
    )
    metrics_compat: bool = field(
        default=False,
        metadata={"help": "also the metrics that gateways and dashboards read from vLLM's servers"},
    )
    drain_delay_s: float = field(
        default=0.0,
        metadata={
            "min": 0,
            "help": "seconds for which connections are still accepted after a signal to stop, "
            "while load balancers learn of it",
        },
    )
    max_connections: int = field(default=8192, metadata={"fixed": True})
    max_connections_per_address: int = field(
        default=0, metadata={"min": 0, "help": "the same from one address (0 = no cap)"}
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata={
            "flag": "cors-origin",
            "help": "origin whose web pages may call, e.g. https://app.example (default: none)",
        },
    )
    tls_cert: Path | None = field(
        default=None, metadata={"help": "PEM file with the certificate chain: serve HTTPS"}
    )
    tls_key: Path | None = field(default=None, metadata={"help": "PEM file with its private key"})
    router_processes: int = field(
        default=1,
        metadata={
            "min": 1,
            "max": MAX_ROUTER_PROCESSES,
            "help": "router processes on the port, each on a core of its own; several need --redis",
        },
    )
    metrics_port: int = field(
        default=0,
        metadata={
            "max": 65535,
            "help": "port for /metrics and /health alone; each of several processes takes the next"
            " (0 = none)",
        },
    )
    idempotency_ttl_s: float = field(default=3600.0, metadata={"fixed": True})
    worker_silence_s: float = field(default=1.0, metadata={"fixed": True})
    quarantine_s: float = field(default=300.0, metadata={"fixed": True})
    otlp_endpoint: str = field(
        default="",
        metadata={"help": "where traces go (OTLP over HTTP), e.g. http://collector:4318"},
    )
    trace_sample: float = field(
        default=1.0,
        metadata={"max": 1, "help": "share of requests to trace, where the caller did not decide"},
    )
    log_requests: Literal["no", "yes", "prompts"] = field(
        default="no",
        metadata={"help": "a log line for each request; prompts: with what was asked"},
    )
    log_format: Literal["text", "json"] = field(
        default="text", metadata={"help": "log lines for people or for programs"}
    )
    drain_timeout_s: float = field(
        default=30.0, metadata={"help": "longest wait for running answers after a signal to stop"}
    )
    redis: str = field(
        default="",
        metadata={
            "help": "Redis that routers share: redis://, rediss://, unix:// or redis+sentinel://"
        },
    )
    redis_password: str = field(default="", metadata={"help": "password of Redis", "secret": True})
    redis_prefix: str = field(
        default="loraplex", metadata={"help": "of every key there, so that fleets can share one"}
    )
    redis_timeout_s: float = field(
        default=0.05,
        metadata={
            "min": 0.001,
            "help": "longest wait for Redis; then it is asked no more for a while",
        },
    )
