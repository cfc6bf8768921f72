"""Options of vLLM, SGLang and LoRAX: what each is here. Pure.

`docs/guides/move-over.md` shows these rows: what the flags behind `::` are. A mark says how many
values follow: `!` none, `=` one, `+` several; `*` is any ending, with any values. Without a mark
flags of `_SWITCHES` have none, others one. Of REFUSED, values behind `|` ask for nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
