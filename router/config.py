"""A router's settings: frozen, built once by the launcher, no I/O here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loraplex.adapters.common.option import fixed, option
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

    workers: tuple[str, ...] = option(
        (), "workers to serve from, e.g. ws://10.0.0.7:8090", flag="worker"
    )
    bases: tuple[str, ...] = option(
        (),
        "a name of a base model to serve, as its workers say it; the first answers requests that"
        " name no model (default: the one base that workers bring)",
        flag="base",
    )
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8080, "port to listen on (0 = any)")
    uds: Path | None = option(
        None, "path of a Unix socket to listen on, in place of an address and a port"
    )
    secret: str = option("", "shared secret that opens the workers", secret=True)
    cache_dir: Path = option(Path("~/.cache/loraplex"), "where model cards are kept")
    adapters: tuple[str, ...] = option((), "NAME=REF, a public name for an adapter", flag="adapter")
    check_adapters: Literal["start", "use"] = fixed("start")
    adapters_file: Path | None = option(
        None, "YAML or JSON file of adapters, followed as it changes"
    )
    watch_folders: tuple[Path, ...] = option(
        (),
        "folder whose sub-folders are adapters by their names, followed as they come,"
        " change and go; workers must have it below an --adapter-root",
        flag="watch-folder",
    )
    hub_owners: tuple[str, ...] = option((), "Hub owners whose adapters are allowed (default: all)")
    default_adapter: str = option(
        "",
        "name or reference of the adapter of requests that name none; those that name"
        " the base model get the base (default: the base)",
    )
    default_source: Literal["hub", "local", "modelscope"] = option(
        "hub", "source of an adapter_id that names none"
    )
    share_hub_token: bool = option(
        False,
        "lend the operator's Hub token (LORAPLEX_HUB_TOKEN, else HF_TOKEN) to callers"
        " who name a Hub adapter without a token",
    )
    adapter_ttl_s: float = option(
        30.0,
        "seconds for which a resolved reference, and a caller's access, is trusted",
        min=0,
        max=MAX_ADAPTER_TTL_S,
    )
    adapter_timeout_s: float = fixed(120.0)
    max_body_bytes: int = option(4 << 20, "largest request body", min=1, unit="bytes")
    head_timeout_s: float = fixed(10.0)
    body_timeout_s: float = fixed(30.0)
    idle_timeout_s: float = option(
        75.0,
        "how long a connection without a request is kept; more than a proxy in front keeps its own",
        min=1,
    )
    reader_timeout_s: float = fixed(60.0)
    picture_hosts: tuple[str, ...] = option(
        (),
        "host whose images requests may name by https URL: HOST, at public addresses, or HOST:PORT,"
        " at any (default: none; data URLs alone)",
        flag="picture-host",
    )
    max_queue: int = option(1024, "sequences waiting for a worker", min=1)
    max_queue_bytes: int = fixed(256 << 20)
    max_tenant_queue: int | None = option(
        None,
        "sequences of one tenant waiting (default: a share of the queue that leaves"
        " room for others)",
        min=1,
    )
    max_tenant_queue_bytes: int | None = fixed(None)
    worker_wait_s: float = option(
        10.0, "how long requests wait while no worker takes work, before their 503"
    )
    tool_format: str = option(
        "auto", "how the base writes calls of tools: a format's name, or auto: by its chat template"
    )
    reasoning_format: str = option(
        "auto",
        "how the base marks its reasoning: a format's name; auto: by the chat template;"
        " none: reasoning is part of the text",
    )
    max_n: int = option(8, "largest n or best_of", min=1)
    max_stop_sequences: int = fixed(16)
    max_logprobs: int = option(20, "most alternatives a token", min=0, max=1 << 16)
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] = option(
        "raw",
        "logprobs of generated tokens: of the raw logits, or processed: of the"
        " distribution that the draw used",
    )
    request_timeout_s: float = option(
        600.0, "longest time from a request to its last token", min=0.1
    )
    max_stream_buffer: int = fixed(1024)
    max_stream_buffer_bytes: int = fixed(8 << 20)
    hub_token: str = option(
        "", "Hub credential that opens registered adapters", fallback="HF_TOKEN", secret=True
    )
    admin_key: str = option(
        "", "key that opens the operator's routes: /v1/adapters, /v1/keys, …", secret=True
    )
    auth: Literal["auto", "keys", "none"] = option(
        "auto",
        "who may use the API: who has a key, or anyone (auto: anyone on a loopback"
        " address without --keys-file, else keys)",
    )
    keys_file: Path | None = option(
        None, "YAML or JSON file of keys and tenants, followed as it changes"
    )
    prices: Path | None = option(
        None, "YAML or JSON file of prices, by which usage and answers say what requests cost"
    )
    share_prefixes: bool = option(
        False, "let tenants share cached prefixes (faster; timing may show who said what)"
    )
    quota_outage: Literal["local-share", "open", "closed"] = option(
        "local-share",
        "without Redis: count here, against this router's share; do not count; or 503, to keys"
        " made by API and requests with an Idempotency-Key, too",
    )
    files_dir: Path | None = option(
        None,
        "folder of /v1/files and /v1/batches, which several routers share (default: they are off)",
    )
    files: FilesLimits = FilesLimits()
    batch: BatchLimits = BatchLimits()
    responses: ResponsesLimits = ResponsesLimits()
    upload: UploadOptions = UploadOptions()
    max_requests: int = option(4096, "requests being answered at once, streams included", min=1)
    grammar: GrammarLimits = GrammarLimits()
    metrics_adapters: int = option(
        100, "registered adapters with metrics of their own: those with most tokens"
    )
    metrics_compat: bool = option(
        False, "also the metrics that gateways and dashboards read from vLLM's servers"
    )
    drain_delay_s: float = option(
        0.0,
        "seconds for which connections are still accepted after a signal to stop, "
        "while load balancers learn of it",
        min=0,
    )
    max_connections: int = fixed(8192)
    cors_origins: tuple[str, ...] = option(
        (),
        "origin whose web pages may call, e.g. https://app.example (default: none)",
        flag="cors-origin",
    )
    tls_cert: Path | None = option(None, "PEM file with the certificate chain: serve HTTPS")
    tls_key: Path | None = option(None, "PEM file with its private key")
    router_processes: int = option(
        1,
        "router processes on the port, each on a core of its own; several need --redis",
        min=1,
        max=MAX_ROUTER_PROCESSES,
    )
    metrics_port: int = option(
        0,
        "port for /metrics and /health alone; each of several processes takes the next, and each"
        " worker of `serve` one behind them (0 = none)",
        max=65535,
    )
    idempotency_ttl_s: float = fixed(3600.0)
    worker_silence_s: float = fixed(1.0)
    quarantine_s: float = fixed(300.0)
    otlp_endpoint: str = option("", "where traces go (OTLP over HTTP), e.g. http://collector:4318")
    log_requests: Literal["no", "yes", "prompts"] = option(
        "no", "a log line for each request; prompts: with what was asked"
    )
    log_format: Literal["text", "json"] = option("text", "log lines for people or for programs")
    drain_timeout_s: float = option(30.0, "longest wait for running answers after a signal to stop")
    redis: str = option(
        "", "Redis that routers share: redis://, rediss://, unix:// or redis+sentinel://"
    )
    redis_password: str = option("", "password of Redis", secret=True)
    redis_prefix: str = option("loraplex", "of every key there, so that fleets can share one")
    redis_timeout_s: float = option(
        0.05, "longest wait for Redis; then it is asked no more for a while", min=0.001
    )
