"""A command line that was written for vLLM, SGLang or LoRAX, made one of `loraplex serve`. Pure.

`docs/guides/move-over.md` shows the rows of options: what the flags behind `::` are. A mark says
how many values follow: `!` none, `=` one, `+` several; `*` is any ending, with any values. Without
a mark flags of `_SWITCHES` have none, others one. Of REFUSED, values behind `|` ask for nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from loraplex.launcher.options import OptionError

_SWITCHES = ("--enable-", "--disable-", "--skip-", "--use-", "--trust-", "--enforce-")
Kind = Literal["taken", "void", "refused"]
Arity = Literal["switch", "one", "many", "any"]

TAKEN = """\
MODEL :: --model --model-path --model-id
--host :: --hostname
--adapter: `NAME=PATH`, or JSON with name and path :: --lora-modules+ --lora-paths+
--model-name: each is served, beside the model's own :: --served-model-name+
--max-context :: --max-model-len --context-length
--max-running :: --max-num-seqs --max-running-requests
--max-step-tokens :: --max-num-batched-tokens --chunked-prefill-size --max-batch-prefill-tokens
--max-queue :: --max-num-queued-reqs --max-queued-requests
--max-requests :: --max-concurrent-requests
--max-n :: --max-best-of
--tp :: --tensor-parallel-size -tp --tp-size --num-shard
--workers :: --data-parallel-size -dp --dp-size --dp
--gpu-memory-utilization :: --mem-fraction-static --cuda-memory-fraction
--kv-memory :: --kv-cache-memory-bytes
--adapter-slots :: --max-active-adapters
--dtype: `half` and `float`, too :: --dtype
--kv-dtype: `fp8_e4m3` and `int8_per_token_head`, too :: --kv-cache-dtype
--quantize: `fp8`, `bitsandbytes` (`nf4`); of quantised checkpoints nothing :: --quantization -q
--log-requests=yes :: --enable-log-requests
--log-requests=no :: --disable-log-requests
--log-format=json :: --json-output!
--tls-cert :: --ssl-certfile
--tls-key :: --ssl-keyfile
--cors-origin :: --allowed-origins --cors-allow-origin
--picture-host: whole names :: --allowed-media-domains+
--picture-memory=0 :: --language-model-only!
--batch-invariant :: --enable-deterministic-inference
--default-source :: --default-adapter-source --adapter-source
--drain-timeout-s :: --shutdown-timeout
HF_HUB_CACHE :: --download-dir --huggingface-hub-cache
--keys-file: in memory, of a key of all adapters :: --api-key+
"""
VOID = """\
a renewed certificate is taken up without a restart :: --enable-ssl-refresh
adapters are always on, with any targets and ranks in a batch :: --enable-lora --lora-dtype
  --lora-target-modules+ --fully-sharded-loras! --lora-backend --lora-eviction-policy
  --enable-lora-overlap-loading --lora-drain-wait-threshold --adapter-cycle-time-s
  --max-lora-chunk-size
any adapters share a batch; `--adapter-slots` and `--adapter-memory` bound the device's ::
  --max-loras --max-loras-per-batch
a page of the KV cache has 16 tokens :: --block-size --page-size
host memory for adapters is in bytes: `--host-adapter-memory` :: --max-cpu-loras --max-loaded-loras
prefixes are cached, and prompts read in chunks ::
  --enable-prefix-caching --prefix-* --enable-chunked-prefill --chunked-prefill
  --disable-radix-cache --radix-* --disable-chunked-* --max-prefill-tokens --long-prefill-*
there is one way to compute, with graphs where they help :: --enforce-eager --eager! --compile!
  --compilation-config -cc --optimization-level -O -O0! -O1! -O2! -O3! --performance-mode
  --max-seq-len-to-capture --cudagraph-* --cuda-graph-* --max-cudagraph-capture-size
  --disable-cuda-graph --enable-torch-compile --attention-* -ac --prefill-attention-backend
  --decode-attention-backend --sampling-backend --moe-* --mamba-* --linear-* --kernel-config
  --enable-flashinfer-* --disable-cascade-attn --disable-hybrid-kv-cache-manager
`--tp` and `--workers` say how the model lies on GPUs :: --disable-custom-all-reduce --distributed-*
  --nccl-port --sharded --numa-* --max-parallel-loading-workers --enable-expert-parallel -ep!
  --expert-* --ep-size --all2all-backend --enable-eplb --eplb-* --enable-dbo --enable-dp-attention
no draft model is run; `--max-draft` allows drafts of prompts and recent answers :: --speculative-*
  -sc --spec-* --num-speculative-tokens
the chat template tells; `--tool-format` and `--reasoning-format` override it ::
  --enable-auto-tool-choice --tool-call-parser --exclude-tools-when-tool-choice-none!
  --reasoning-parser --chat-template-content-format
answers are held to a shape in one way, always on :: --guided-decoding-* --structured-outputs-config
  --grammar-backend
`--host-kv-memory` and `--disk-kv` keep keys and values below the device :: --swap-space
  --watermark --schedule-conservativeness --kv-offloading-*
  --enable-hierarchical-cache --enable-hicache --hicache-*
a lower `priority` goes first, then tenants and adapters take turns :: --scheduling-policy
  --schedule-* --enable-priority-scheduling --async-scheduling! --stream-interval
`--log-requests` and `--log-format` say what is logged :: --uvicorn-log-level --log-level
  --log-level-http --disable-uvicorn-access-log --log-config-file
  --disable-access-log-for-endpoints= --max-log-len --disable-log-stats --enable-log-outputs
  --enable-log-deltas --log-requests-level
`/metrics` is always answered; `--metrics-compat` adds vLLM's names :: --enable-metrics
  --show-hidden-metrics-for-version --collect-detailed-traces+ --kv-cache-metrics!
  --enable-server-load-tracking
a request's `seed` decides its draws :: --seed --random-seed
a model's files are read in one way, and no code among them is run :: --tokenizer-mode
  --config-format --model-impl --use-tqdm-on-load --safetensors-* --ignore-patterns+
  --model-loader-extra-config --skip-server-warmup --trust-remote-code --code-revision
each request says `return_hidden_states` :: --enable-return-hidden-states
each request says `return_routed_experts` :: --enable-return-routed-experts
the route of a request says what is computed :: --runner --task --convert --is-embedding!
the model's own files say how images are read, and requests hold them :: --limit-mm-* --mm-*
  --media-io-kwargs --allowed-local-media-path --enable-multimodal --skip-mm-profiling
  --keep-mm-feature-on-device! --disable-mm-preprocessor-cache --interleave-mm-strings!
  --disable-fast-image-processor
answers and their headers are as the API's page says :: --allow-credentials! --allowed-methods
  --allowed-headers --enable-prompt-tokens-details --enable-cache-report --enable-request-id-headers
  --disable-fastapi-docs --h11-*
"""
REFUSED = """\
write it as `chat_template.jinja` beside the model's files :: --chat-template
a request says its `chat_template_kwargs`, and a template's name | {} assistant ::
  --default-chat-template-kwargs --trust-request-chat-template --response-role
the tokenizer is the model's own, as `--revision` says :: --tokenizer --tokenizer-path
  --tokenizer-revision --skip-tokenizer-init
weights are read from safetensors | auto safetensors :: --load-format
change the model's `config.json` | {} :: --hf-overrides --rope-scaling --rope-theta
  --json-model-override-args --disable-sliding-window
change the model's `preprocessor_config.json` | {} :: --mm-processor-kwargs
defaults are of the model's `generation_config.json` | auto {} model :: --generation-config
  --override-generation-config --sampling-defaults
say `--pooling` and `--normalize` :: --pooler-config
say `--kv-memory`, in bytes, and `--max-context`, of prompt and output :: --num-gpu-blocks-override
  --max-batch-total-tokens --max-total-tokens --max-input-length --max-input-tokens
say `--adapter-memory`, in bytes :: --adapter-memory-fraction
say `--adapter NAME=REF` for each :: --adapter-id --preloaded-adapter-ids+
say `--tp`, `--workers`, `--router-processes`; another machine is a `loraplex worker` | 1 0 ::
  --pipeline-parallel-size -pp --pp-size --decode-context-parallel-size --data-parallel-* --nnodes
  --node-rank --master-addr --master-port --dist-init-addr --headless! --api-server-count
the model lies on its GPUs: say `--tp` or `--quantize` | 0 :: --cpu-offload-gb --offload-*
a worker computes prompt and answer; `loraplex router` joins workers | null :: --kv-transfer-config
  --ec-* --disaggregation-*
say `--otlp-endpoint`, with the port for HTTP :: --otlp-traces-endpoint
a command line hides nothing: set `HF_TOKEN`, `LORAPLEX_ADMIN_KEY` :: --hf-token --admin-api-key
say `--host`, `--port`, `--tls-cert`, `--tls-key`; a proxy does the rest | 0 :: --grpc!
  --grpc-port --root-path --fastapi-root-path --ssl-ca-certs --ssl-cert-reqs --ssl-keyfile-password
no code of others is loaded | auto :: --middleware --logits-processors+ --tool-parser-plugin
  --reasoning-parser-plugin --tool-server --worker-cls --enable-custom-logit-processor
write its options as flags, or as variables `LORAPLEX_…` :: --config
there is no such field or route :: --enable-sleep-mode --enable-prompt-embeds --enable-return-*
  --return-* --enable-force-include-usage --default-mm-loras
"""

_COUNTED = ("--max-context", "--max-running", "--max-step-tokens", "--kv-memory")
# To ours; "" = nothing is to be said, as a checkpoint's config says it.
_RENAMED = {
    "half": "float16", "float": "float32", "fp8_e4m3": "fp8",
    "int8_per_token_head": "int8", "bitsandbytes": "nf4", "awq": "",
    "awq_marlin": "", "gptq": "", "gptq_marlin": "", "compressed-tensors": "", "modelopt": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OtherOption:
    """An option of another server, and what it is here. to: our flag, `MODEL` or a variable, of
    what is taken. harmless: values with which a refused option asks for nothing. arities: how
    many values follow each flag.
    """

    kind: Kind
    to: str
    why: str
    harmless: tuple[str, ...]
    arities: dict[str, Arity]


def _rows(kind: Kind, text: str) -> Iterator[OtherOption]:
    for line in text.replace("\n  ", " ").splitlines():
        head, _, flags = line.partition(" ::")
        said, _, harmless = head.partition(" | ")
        to, _, why = said.partition(": ") if kind == "taken" else ("", "", said)
        arities = {flag.rstrip("!=+"): _arity(flag) for flag in flags.split()}
        yield OtherOption(kind, to, why, tuple(harmless.split()), arities)


def _arity(flag: str) -> Arity:
    marked: dict[str, Arity] = {"!": "switch", "=": "one", "+": "many", "*": "any"}
    return marked.get(flag[-1]) or ("switch" if flag.startswith(_SWITCHES) else "one")


ROWS = (*_rows("taken", TAKEN), *_rows("void", VOID), *_rows("refused", REFUSED))
FLAGS = {flag: row for row in ROWS for flag in row.arities}


def find(flag: str) -> tuple[OtherOption, Arity] | None:
    """The row of a flag, and how many values follow; None where none has it."""
    stems = (known for known in FLAGS if known[-1] == "*" and flag.startswith(known[:-1]))
    known = flag if flag in FLAGS else next(stems, None)
    return None if known is None else (FLAGS[known], FLAGS[known].arities[known])


@dataclass(slots=True)
class Moved:
    """A command line of another server, moved to this one. words: for the parser. notes: for a
    person. api_keys: in clear.
    """

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    api_keys: list[str] = field(default_factory=list)
    is_foreign: bool = False


def move(words: Sequence[str], own: Mapping[str, bool]) -> Moved:
    """Turns a command line of another server into one for this server. Move a line. own: known
    flags, and whether a value follows. Unknown ones stay. Raises OptionError, with no API key.
    """
    moved, left = Moved(), list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if not flag.startswith("-"):
            moved.words.append(flag + equals + value)
            continue
        flag = flag if flag in own else flag.replace("_", "-")
        found = _row(flag, own)
        arity = found[1] if found else "one" if own.get(flag) else "switch"
        values = [value] if equals else list(_values(arity, left))
        if found is None:
            moved.words.append(f"{flag}={values[0]}" if values else flag)
        else:
            moved.is_foreign |= flag not in own
            _take(moved, flag, values, *found)
    return moved


def _row(flag: str, own: Mapping[str, bool]) -> tuple[OtherOption, Arity] | None:
    name = flag.partition(".")[0]  # of a field within an option's JSON
    on = "--" + name.removeprefix("--no-")
    return None if name in own and name not in FLAGS else find(name) or find(on)


def _values(arity: Arity, left: list[str]) -> Iterator[str]:
    most = {"switch": 0, "one": 1}.get(arity, len(left))
    while most and left and not re.match(r"-(?!\d)", left[0]):
        most -= 1
        yield left.pop(0)


def _take(moved: Moved, flag: str, values: list[str], row: OtherOption, arity: Arity) -> None:
    is_off = find(flag.partition(".")[0]) is None
    if row.kind == "void":
        moved.notes.append(f"{flag} has no effect here: {row.why}".replace("`", ""))
    elif row.kind == "refused":
        if not (is_off or values and {*values} <= {*row.harmless}):
            raise OptionError(f"{flag}: {row.why}".replace("`", ""))
    elif arity == "switch":
        moved.words += [] if is_off else [row.to]
    elif not values:
        raise OptionError(f"{flag} needs a value")
    elif row.to == "--keys-file":
        moved.api_keys += values
    elif row.to == "MODEL":
        moved.words.insert(0, values[0])
    elif not row.to.startswith("--"):
        moved.environ[row.to] = values[0]
    else:
        try:
            read = [ours for text in values for ours in _read(row.to, text)]
        except ValueError as error:
            raise OptionError(f"{flag}: {error}") from None
        moved.words += [f"{row.to}={value}" for value in read if value]


def _read(to: str, text: str) -> Sequence[str]:
    if to == "--adapter" and text.lstrip().startswith(("{", "[")):
        found = json.loads(text)
        return [_adapter(entry) for entry in (found if isinstance(found, list) else [found])]
    if to == "--cors-origin" and text.startswith("["):
        return [str(origin) for origin in json.loads(text)]
    if to in _COUNTED:
        return [_count(text)]
    return [_RENAMED.get(text, text) if to in ("--dtype", "--kv-dtype", "--quantize") else text]


def _count(text: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text)
    if found is None:
        return "" if text in ("auto", "-1") else text
    unit = 1000 if found[2].islower() else 1024
    return str(int(float(found[1]) * unit ** ("kmgt".index(found[2].lower()) + 1)))


def _adapter(entry: object) -> str:
    fields = dict(entry) if isinstance(entry, dict) else {}
    fields.pop("base_model_name", None)
    name, path = (fields.pop(k, None) or fields.pop(f"lora_{k}", None) for k in ("name", "path"))
    if any(fields.values()) or not (name and path):
        raise ValueError(f"expected name and path alone, got {entry!r}; see --adapters-file")
    return f"{name}={path}"
