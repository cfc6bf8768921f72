"""A worker's and an engine's settings: frozen, built once by the launcher."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from loraplex.adapters.common.option import fixed, option
from loraplex.adapters.errors import CommandError
from loraplex.adapters.grammar.limits import ServedGrammarLimits
from loraplex.adapters.manifest import SlabDtype
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.ref import MODELSCOPE_ENDPOINT
from loraplex.server.protocol import TextPooling

Device = Literal["auto", "cpu", "cuda"]
ServeMode = Literal["server", "local", "interactive"]
# Of keys and values: as what is computed, E4M3, or int8 with a scale for each head of a token.
KvDtype = Literal["auto", "fp8", "int8"]
# How weights in floating point are quantised when they are loaded.
AtLoad = Literal["fp8", "nf4"]
Activations = Literal["auto", "bf16"]


# A step has room for so many decodes at least where there are drafts.
_DRAFTING_DECODES = 16


def set_unset_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process's environment that are not set, for libraries."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


class ConfigError(CommandError, ValueError):
    """An option that this model or machine cannot have; str() names it, and what would do."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: a model copy with its engine. Fields are options of `loraplex worker`."""

    model: str = field(metadata={"help": "Hub id or folder of the base model"})
    revision: str | None = option(None, "branch, tag or commit of MODEL")
    host: str = option("127.0.0.1", "address to listen on for routers")
    port: int = option(8090, "port to listen on for routers (0 = any)")
    secret: str = option("", "shared secret that routers must show", secret=True)
    advertise: str = option("", "address that routers reach it at, such as ws://10.0.0.7:8090")
    worker_id: str = option("", "name of this worker (default: made up)")
    device: Device = option("auto", "where to compute")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "auto", "of weights and activations (auto: fp32 on a CPU)"
    )
    tp: int = option(
        1,
        "GPUs that share the model, each with a part of every matrix (tensor"
        " parallelism); on a CPU processes",
        min=1,
        max=64,
    )
    quantize: AtLoad | None = option(
        None, "matrices of layers are quantised so when they are loaded"
    )
    activations: Activations = option(
        "auto",
        "bf16: FP8 and int8 weights are multiplied with inputs that are not rounded"
        " (auto: as the checkpoint says; of --quantize fp8 they are)",
    )
    kv_dtype: KvDtype = option(
        "auto", "of keys and values (auto: as --dtype; int8: each head of a token has a scale)"
    )
    cache_dir: Path = option(Path("~/.cache/loraplex"), "fetched adapters and packed slabs")
    upload_store: Path | None = option(
        None,
        "folder of uploaded adapters; routers share it, and workers that see it are not"
        " sent files (default: uploads in --cache-dir)",
    )
    adapter_roots: tuple[Path, ...] = option((), "folder under which local: adapters may lie")
    hub_owners: tuple[str, ...] = option((), "Hub owner whose adapters are allowed (default: all)")
    allow_other_base: bool = option(False, "accept adapters that name another base model")
    text_part_only: bool = option(
        False,
        "serve the text part of adapters that also change the part for images, and call"
        " them partial",
    )
    max_adapter_bytes: int = fixed(4 << 30)
    max_table_bytes: int = fixed(AdapterLimits().max_table_bytes)
    max_lora_rank: int = option(256, "largest LoRA rank", min=1, max=256)
    mode: ServeMode = option(
        "server",
        "what sizes are for where no option gives them: `server` = as much at once as"
        " the machine holds, `local` = 4 sequences, `interactive` = 1; the rest of a GPU is"
        " left to other programs",
    )
    adapter_memory: int | None = option(
        None,
        "device memory for adapters (default: a tenth of a GPU, 256MiB on a CPU)",
        min=1,
        unit="bytes",
    )
    host_adapter_memory: int | None = option(
        None,
        "host memory for adapters (default: as on the GPU, at most a quarter of the"
        " memory; 512MiB on a CPU)",
        min=1,
        unit="bytes",
    )
    kv_memory: int | None = option(
        None,
        "device memory for the KV cache (default: what is left of a GPU, 256MiB on a CPU)",
        min=1,
        unit="bytes",
    )
    host_kv_memory: int = option(
        0,
        "host memory for keys and values, and snapshots of states, that the device has no room"
        " for: prompts go on from them, and preempted sequences too (0 = none)",
        min=0,
        unit="bytes",
    )
    disk_kv: int = option(
        0,
        "disk in --cache-dir for those that --host-kv-memory has no room for; they outlive the"
        " worker (0 = none)",
        min=0,
        unit="bytes",
    )
    snapshot_memory: int | None = option(
        None,
        "device memory for snapshots of states, by which prompts reuse what others have"
        " computed, where the model has states (default: a sixteenth of the memory, but no more"
        " than 4 for each of --max-running, or 16); 0 = none",
        min=0,
        unit="bytes",
    )
    picture_memory: int = option(
        256 << 20,
        "device memory for results of pictures, which prompts with the same picture share, where"
        " the model reads pictures; 0 = it reads none, and its part for images is not loaded",
        min=0,
        unit="bytes",
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory to use when --kv-memory is not given", min=0.05, max=1
    )
    max_context: int | None = option(
        None, "prompt and output tokens together (default: the model's)", min=1
    )
    max_running: int | None = option(
        None,
        "sequences computed at once (default: 128 on a GPU, 256 from 32 GiB, 512 from"
        " 64 GiB; 64 on a CPU; no more than have their states in an eighth of the memory)",
        min=1,
    )
    max_waiting: int | None = fixed(None)
    max_step_tokens: int | None = option(
        None,
        "token budget of one step, for chunked prefill (default: 2048 on a GPU, 4096"
        " from 32 GiB, 8192 from 64 GiB; 512 on a CPU)",
        min=1,
    )
    max_draft: int | None = option(
        None,
        "tokens of a sequence that a step may check at once, of a draft that its"
        " prompt, its grammar and earlier answers of the same adapter and tenant suggest;"
        " 0 = no drafts (default: 8 on a CPU and in modes of few sequences, 0 otherwise)",
        min=0,
        max=16,
    )
    batch_step_share: float = fixed(0.125)
    step_target_ms: float = option(
        60.0,
        "a step takes no more prompt tokens beside running streams than keep it within"
        " so many milliseconds, by the times of earlier steps, but at least 256",
        min=1,
    )
    prompt_share: float = fixed(0.5)
    page_size: int = fixed(16)
    adapter_slots: int = option(256, "adapters on the device at once", min=1, max=1 << 16)
    dora_graphs: bool = option(
        False,
        "on a GPU also capture steps that have adapters with DoRA or biases: these are"
        " faster, the start takes longer",
    )
    batch_invariant: bool = option(
        False,
        "no bit of an answer's log-probabilities depends on the requests beside it, on how its"
        " prompt was cut, on reused prefixes or on preemption; slower, and refused for what has"
        " no such kernels",
    )
    model_names: tuple[str, ...] = option(
        (), "further name of the base model, for clients and adapters"
    )
    drain_timeout_s: float = option(30.0, "seconds in which running sequences may end at a stop")
    step_timeout_s: float = option(
        120.0, "seconds without a step, with work to do, until the engine is restarted", min=1
    )
    adapter_disk: int = option(
        AdapterLimits().max_store_bytes, "disk for fetched and packed adapters", min=1, unit="bytes"
    )
    s3_buckets: tuple[str, ...] = option((), "S3 bucket whose adapters are allowed (default: none)")
    https_hosts: tuple[str, ...] = option(
        (), "host for https: adapters; HOST:PORT may be private (default: none)"
    )
    modelscope_owners: tuple[str, ...] = option(
        (), "owner on ModelScope whose public adapters are allowed; * = all (default: none)"
    )
    modelscope_endpoint: str = option(
        MODELSCOPE_ENDPOINT, "where ModelScope, or a mirror of its API, is"
    )
    pooling: TextPooling | None = option(
        None,
        "how vectors are made of a text's tokens (default: as the model's files say,"
        " else `last`, of encoders `mean`)",
    )
    normalize: Literal["yes", "no"] | None = option(
        None,
        "whether vectors have length 1 where no request says it (default: as the"
        " model's files say, else yes)",
    )
    prompts: tuple[str, ...] = option(
        (),
        "NAME=TEXT: what is put before a text whose request names it, beside those of"
        " the model's files",
    )
    default_prompt: str = option("", "the prompt of requests for vectors that name none")
    rerank_tokens: str = option(
        "",
        "YES,NO: tokens whose logits say how well a document fits a query (default: of"
        " Qwen3-Reranker its own)",
    )
    rerank_template: str = option(
        "",
        "what a reranker reads, with {query}, {document} and perhaps {instruction}"
        " (default: of Qwen3-Reranker its own, else the tokenizer's pair)",
    )
    rerank_instruction: str = option("", "the instruction of requests that have none")
    log_format: Literal["text", "json"] = option("text", "log lines for people or for programs")
    grammar: ServedGrammarLimits = ServedGrammarLimits()
    executor: str = option("torch", "torch, or MODULE:FACTORY[:TEXT] of another engine, for tests")
    redis: str = option(
        "", "Redis in which routers find this worker: redis://, rediss:// or unix://"
    )
    redis_password: str = option("", "password of Redis", secret=True)
    redis_prefix: str = option("loraplex", "of every key there, so that fleets can share one")


class EngineConfig(msgspec.Struct, frozen=True):
    """The engine process's configuration, which comes on its command line as JSON.

    dtype is resolved; model_path is a folder. host_arena_bytes: size of the shared arena it maps.
    quantize: weights in floating point at load; None = not. activations: inputs of products.
    shards: devices that share the model.
    Memory is that of each device, but for the host arena. kv_memory: 0 = what weights, adapters and
    workspace leave of the GPU's share that may be used, and of that no more than `kv_contexts`
    sequences of the whole context need; 0 = any. host_kv_memory, disk_kv: of each device's process.
    kv_folder: where pages lie on disk, under base_digest, that of the model as it is served.
    picture_tokens: no picture has more; 0 = that is not known.
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
    batch_invariant: bool = False
    batch_step_share: float = 0.125
    step_target_ms: float = 60.0
    prompt_share: float = 0.5
    max_draft: int = 0
    draft_memory: int = 64 << 20
    snapshot_memory: int = 0
    picture_memory: int = 256 << 20
    picture_tokens: int = 0
    host_kv_memory: int = 0
    disk_kv: int = 0
    kv_folder: str = ""
    base_digest: str = ""

    @property
    def max_decodes(self) -> int:
        """Tokens of the decode slices of a step; 0 = no slice has a draft."""
        return max(self.max_running, _DRAFTING_DECODES) if self.max_draft else 0
