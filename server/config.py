"""A worker's and an engine's settings: frozen, built once by the launcher."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from loraplex.adapters.errors import CommandError
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.manifest import SlabDtype
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import MODELSCOPE_ENDPOINT
from loraplex.server.protocol import TextPooling

Device = Literal["auto", "cpu", "cuda"]
ServeMode = Literal["server", "local", "interactive"]
# Of keys and values: as what is computed, or E4M3.
KvDtype = Literal["auto", "fp8", "int8"]
# How weights in floating point are quantised when they are loaded.
AtLoad = Literal["fp8", "nf4"]
Activations = Literal["auto", "bf16"]


# A step has room for so many decodes at least where there are drafts.
_DRAFTING_DECODES = 16


def set_unset_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process's environment, unless they are set, for libraries that read
    them.
    """
    for name, value in values.items():
        os.environ.setdefault(name, value)


class ConfigError(CommandError, ValueError):
    """An option that this model or machine cannot have; str() names it, and what would do."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: a model copy with its engine. Fields are options of `loraplex worker`."""

    model: str = field(metadata={"help": "Hub id or folder of the base model"})
    revision: str | None = field(default=None, metadata={"help": "branch, tag or commit of MODEL"})
    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on for routers"})
    port: int = field(default=8090, metadata={"help": "port to listen on for routers (0 = any)"})
    secret: str = field(
        default="", metadata={"help": "shared secret that routers must show", "secret": True}
    )
    advertise: str = field(
        default="",
        metadata={"help": "address that routers reach it at, such as ws://10.0.0.7:8090"},
    )
    worker_id: str = field(default="", metadata={"help": "name of this worker (default: made up)"})
    device: Device = field(default="auto", metadata={"help": "where to compute"})
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = field(
        default="auto", metadata={"help": "of weights and activations (auto: fp32 on a CPU)"}
    )
    tp: int = field(
        default=1,
        metadata={
            "min": 1,
            "max": 64,
            "help": "GPUs that share the model, each with a part of every matrix (tensor"
            " parallelism); on a CPU processes",
        },
    )
    quantize: AtLoad | None = field(
        default=None,
        metadata={"help": "matrices of layers are quantised so when they are loaded"},
    )
    activations: Activations = field(
        default="auto",
        metadata={
            "help": "bf16: FP8 and int8 weights are multiplied with inputs that are not rounded"
            " (auto: as the checkpoint says; of --quantize fp8 they are)"
        },
    )
    kv_dtype: KvDtype = field(
        default="auto",
        metadata={
            "help": "of keys and values (auto: as --dtype; int8: each head of a token has a scale)"
        },
    )
    cache_dir: Path = field(
        default=Path("~/.cache/loraplex"), metadata={"help": "fetched adapters and packed slabs"}
    )
    upload_store: Path | None = field(
        default=None,
        metadata={
            "help": "folder of uploaded adapters; routers share it, and workers that see it are not"
            " sent files (default: uploads in --cache-dir)"
        },
    )
    adapter_roots: tuple[Path, ...] = field(
        default=(), metadata={"help": "folder under which local: adapters may lie"}
    )
    hub_owners: tuple[str, ...] = field(
        default=(), metadata={"help": "Hub owner whose adapters are allowed (default: all)"}
    )
    allow_other_base: bool = field(
        default=False, metadata={"help": "accept adapters that name another base model"}
    )
    text_part_only: bool = field(
        default=False,
        metadata={
            "help": "serve the text part of adapters that also change the part for images, and call"
            " them partial"
        },
    )
    max_adapter_bytes: int = field(default=4 << 30, metadata={"fixed": True})
    max_table_bytes: int = field(default=AdapterLimits().max_table_bytes, metadata={"fixed": True})
    max_lora_rank: int = field(
        default=256, metadata={"min": 1, "max": 256, "help": "largest LoRA rank"}
    )
    mode: ServeMode = field(
        default="server",
        metadata={
            "help": "what sizes are for where no option gives them: `server` = as much at once as"
            " the machine holds, `local` = 4 sequences, `interactive` = 1; the rest of a GPU is"
            " left to other programs"
        },
    )
    adapter_memory: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "help": "device memory for adapters (default: a tenth of a GPU, 256MiB on a CPU)",
            "unit": "bytes",
        },
    )
    host_adapter_memory: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "help": "host memory for adapters (default: as on the GPU, at most a quarter of the"
            " memory; 512MiB on a CPU)",
            "unit": "bytes",
        },
    )
    kv_memory: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "help": "device memory for the KV cache (default: what is left of a GPU, 256MiB on a"
            " CPU)",
            "unit": "bytes",
        },
    )
    snapshot_memory: int | None = field(
        default=None,
        metadata={
            "min": 0,
            "help": "device memory for snapshots of states, by which prompts reuse what others have"
            " computed, where the model has states (default: a sixteenth of the memory, but no more"
            " than 4 for each of --max-running, or 16); 0 = none",
            "unit": "bytes",
        },
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata={
            "min": 0.05,
            "max": 1,
            "help": "share of the GPU's memory to use when --kv-memory is not given",
        },
    )
    max_context: int | None = field(
        default=None,
        metadata={"min": 1, "help": "prompt and output tokens together (default: the model's)"},
    )
    max_running: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "help": "sequences computed at once (default: 128 on a GPU, 256 from 32 GiB, 512 from"
            " 64 GiB; 64 on a CPU; no more than have their states in an eighth of the memory)",
        },
    )
    max_waiting: int | None = field(default=None, metadata={"fixed": True})
    max_step_tokens: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "help": "token budget of one step, for chunked prefill (default: 2048 on a GPU, 4096"
            " from 32 GiB, 8192 from 64 GiB; 512 on a CPU)",
        },
    )
    max_draft: int | None = field(
        default=None,
        metadata={
            "min": 0,
            "max": 16,
            "help": "tokens of a sequence that a step may check at once, of a draft that its"
            " prompt, its grammar and earlier answers of the same adapter and tenant suggest;"
            " 0 = no drafts (default: 8 on a CPU and in modes of few sequences, 0 otherwise)",
        },
    )
    batch_step_share: float = field(default=0.125, metadata={"fixed": True})
    step_target_ms: float = field(
        default=60.0,
        metadata={
            "min": 1,
            "help": "a step takes no more prompt tokens beside running streams than keep it within"
            " so many milliseconds, by the times of earlier steps, but at least 256",
        },
    )
    prompt_share: float = field(default=0.5, metadata={"fixed": True})
    page_size: int = field(default=16, metadata={"min": 1, "help": "tokens a KV page"})
    adapter_slots: int = field(
        default=256, metadata={"min": 1, "max": 1 << 16, "help": "adapters on the device at once"}
    )
    dora_graphs: bool = field(
        default=False,
        metadata={
            "help": "on a GPU also capture steps that have adapters with DoRA or biases: these are"
            " faster, the start takes longer"
        },
    )
    model_names: tuple[str, ...] = field(
        default=(),
        metadata={"help": "further name of the base model, for clients and adapters"},
    )
    drain_timeout_s: float = field(
        default=30.0, metadata={"help": "seconds in which running sequences may end at a stop"}
    )
    step_timeout_s: float = field(
        default=120.0,
        metadata={
            "min": 1,
            "help": "seconds without a step, with work to do, until the engine is restarted",
        },
    )
    adapter_disk: int = field(
        default=AdapterLimits().max_store_bytes,
        metadata={"min": 1, "help": "disk for fetched and packed adapters", "unit": "bytes"},
    )
    s3_buckets: tuple[str, ...] = field(
        default=(), metadata={"help": "S3 bucket whose adapters are allowed (default: none)"}
    )
    https_hosts: tuple[str, ...] = field(
        default=(),
        metadata={"help": "host for https: adapters; HOST:PORT may be private (default: none)"},
    )
    modelscope_owners: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "owner on ModelScope whose public adapters are allowed; * = all (default: none)"
        },
    )
    modelscope_endpoint: str = field(
        default=MODELSCOPE_ENDPOINT,
        metadata={"help": "where ModelScope, or a mirror of its API, is"},
    )
    pooling: TextPooling | None = field(
        default=None,
        metadata={
            "help": "how vectors are made of a text's tokens (default: as the model's files say,"
            " else `last`, of encoders `mean`)"
        },
    )
    normalize: Literal["yes", "no"] | None = field(
        default=None,
        metadata={
            "help": "whether vectors have length 1 where no request says it (default: as the"
            " model's files say, else yes)"
        },
    )
    prompts: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "NAME=TEXT: what is put before a text whose request names it, beside those of"
            " the model's files"
        },
    )
    default_prompt: str = field(
        default="", metadata={"help": "the prompt of requests for vectors that name none"}
    )
    rerank_tokens: str = field(
        default="",
        metadata={
            "help": "YES,NO: tokens whose logits say how well a document fits a query (default: of"
            " Qwen3-Reranker its own)"
        },
    )
    rerank_template: str = field(
        default="",
        metadata={
            "help": "what a reranker reads, with {query}, {document} and perhaps {instruction}"
            " (default: of Qwen3-Reranker its own, else the tokenizer's pair)"
        },
    )
    rerank_instruction: str = field(
        default="", metadata={"help": "the instruction of requests that have none"}
    )
    log_format: Literal["text", "json"] = field(
        default="text", metadata={"help": "log lines for people or for programs"}
    )
    grammar: ServedGrammarLimits = ServedGrammarLimits()
    executor: str = field(
        default="torch",
        metadata={"help": "torch, or MODULE:FACTORY[:TEXT] of another engine, for tests"},
    )
    redis: str = field(
        default="",
        metadata={
            "help": "Redis in which routers find this worker: redis://, rediss:// or unix://"
        },
    )
    redis_password: str = field(default="", metadata={"help": "password of Redis", "secret": True})
    redis_prefix: str = field(
        default="loraplex", metadata={"help": "of every key there, so that fleets can share one"}
    )


class EngineConfig(msgspec.Struct, frozen=True):
    """The engine process's configuration, which comes on its command line as JSON.

    dtype is resolved; model_path is a folder. host_arena_bytes: size of the shared arena it maps.
    quantize: weights in floating point at load; None = not. activations: inputs of products.
    shards: devices that share the model.
    Memory is that of each device, but for the host arena. kv_memory: 0 = what weights, adapters and
    workspace leave of the GPU's share that may be used, and of that no more than `kv_contexts`
    sequences of the whole context need; 0 = any.
    """

    model_path: str
    device: Literal["cpu", "cuda"]
    dtype: SlabDtype
    page_size: int
    kv_memory: int
    adapter_memory: int
    host_arena_bytes: int
    extent_bytes: int
    max_context: int | None
    max_running: int
    max_waiting: int
    max_step_tokens: int
    adapter_slots: int
    gpu_memory_utilization: float = 0.9
    quantize: AtLoad | None = None
    activations: Activations = "auto"
    kv_dtype: KvDtype = "auto"
    log_format: Literal["text", "json"] = "text"
    grammar: ServedGrammarLimits = ServedGrammarLimits()
    kv_contexts: int = 0
    shards: int = 1
    dora_graphs: bool = False
    batch_step_share: float = 0.125
    step_target_ms: float = 60.0
    prompt_share: float = 0.5
    max_draft: int = 0
    draft_memory: int = 64 << 20
    snapshot_memory: int = 0

    @property
    def max_decodes(self) -> int:
        """Tokens of the decode slices of a step; 0 = no slice has a draft."""
        return max(self.max_running, _DRAFTING_DECODES) if self.max_draft else 0
