"""The real engine in this process, with random weights and adapters: no HTTP, no worker."""

import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from loraplex.adapters.base import CHOOSERS, BaseModule, BaseSpec, base_modules
from loraplex.adapters.byte_tokens import BYTE_OF_CHAR
from loraplex.adapters.errors import Findings
from loraplex.adapters.grammar.vocabulary import Vocabulary, make_vocabulary
from loraplex.adapters.manifest import SlabDtype, SlabLayout
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.lora_tensors import LoraTensors, ModuleLora, OwnTable
from loraplex.adapters.safetensors.header import TensorInfo
from loraplex.adapters.slab.layout import make_layout
from loraplex.launcher.bench.engine.group import make_executor
from loraplex.launcher.bench.errors import BenchError
from loraplex.launcher.known_models import served_families
from loraplex.server.config import EngineConfig, KvDtype
from loraplex.server.constraints.constraints import make_constraints
from loraplex.server.engine.loop import EngineLoop
from loraplex.server.engine.memory.residency import FREE, fit
from loraplex.server.engine.messages import (
    FromEngine,
    NeedSlab,
    Shutdown,
    SlabStaged,
    StepOutput,
    Submit,
    ToEngine,
)
from loraplex.server.engine.scheduling import sequence as rows
from loraplex.server.engine.scheduling.drafting import Drafting
from loraplex.server.engine.scheduling.scheduler import Scheduler
from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE
from loraplex.server.model.devices.sharding import sharded
from loraplex.server.model.ops.memory import page_token_bytes
from loraplex.server.model.spec.base_spec import base_spec
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.page_groups import page_groups
from loraplex.server.model.tokenizer.grammar_vocabulary import read_vocabulary
from loraplex.server.protocol import GenerateRequest, SamplingParams, VectorParams

_SPACE = "Ġ"  # how byte-level vocabularies spell a space before a word

EXTENT_BYTES = 512 << 10
GREEDY = SamplingParams(temperature=0.0)
PAGE_SIZE = 16
ADAPTER_SLOTS = 256  # as many as a server has
Note = Callable[[StepOutput], None]
_IDLE_S = 1e-4
_SPARE_KV = 64 << 20
_DRAFTED = 1  # the token of every draft


def tokenizer_json(vocab_size: int, special: Sequence[int]) -> str:
    """Writes a `tokenizer.json`: every byte that the vocabulary has room for, then made-up
    words, so that every id has a text. special: ids that have none."""
    words = itertools.chain(BYTE_OF_CHAR, _words())
    vocab: dict[str, int] = {}
    for token_id in range(vocab_size):
        token = f"<|{token_id}|>" if token_id in special else next(words)
        vocab[token] = token_id
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(f"<|{token_id}|>", special=True) for token_id in sorted(special)]
    tokenizer.add_special_tokens(added)
    return str(tokenizer.to_str())


def _words() -> Iterator[str]:
    for length in itertools.count(3):
        for letters in itertools.product(ascii_lowercase, repeat=length):
            yield _SPACE + "".join(letters)


SHIPPED = Path(__file__).parent / "configs"


def model_folder(text: str) -> Path:
    """Finds the folder of a config.json: a path, a name that ships with the project, or a family's
    known model (`gemma-2-9b`)."""
    path = Path(text)
    if path.is_dir():
        return path
    if (SHIPPED / text).is_dir():
        return SHIPPED / text
    examples = {known.example.lower() for known in served_families().values()}
    return Path(_folder_of_known(text).name) if text and text in examples else path


@cache
def _folder_of_known(example: str) -> "TemporaryDirectory[str]":
    """Makes a folder with a config.json, for as long as the process runs."""
    known = {known.example.lower(): known for known in served_families().values()}[example]
    folder = TemporaryDirectory()
    Path(folder.name, CONFIG_FILE).write_bytes(msgspec.json.encode(known.config))
    return folder


def require_cuda(advice: str) -> None:
    """Checks that there is a GPU. Raises BenchError where torch has no CUDA device."""
    if not torch.cuda.is_available():
        raise BenchError(f"there is no CUDA device here: {advice}")


def check_device(device: str) -> None:
    """Raises BenchError where a command's `--device` is not there."""
    if device == "cuda":
        require_cuda("--device cpu needs none")


class MadeForm(NamedTuple):
    """Form of made-up adapters, beyond LoRA of all layers. experts: they change experts too. dora:
    they scale the base's outputs. own_heads: how many of them have a head of their own."""

    experts: bool = False
    dora: bool = False
    own_heads: int = 0


PLAIN = MadeForm()


def adapted_modules(base: BaseSpec, *, experts: bool = False) -> Iterator[BaseModule]:
    """Yields the modules that made-up adapters change: the projections of all tokens in every
    layer of the text part, and experts where that is asked for."""
    for module in base_modules(base.text_part):
        if module.layer < 0 or (module.shape.is_of_experts and not experts):
            continue
        sites = base.layers[module.layer].sites
        if not any(module.name in sites.get(role, ()) for role in CHOOSERS):
            yield module


def lora_layout(
    base: BaseSpec, digest: str, lora_rank: int, dtype: SlabDtype, form: MadeForm = PLAIN
) -> SlabLayout:
    """An adapter of one rank on `adapted_modules`, with a head where the form has any."""
    adapted = list(adapted_modules(base, experts=form.experts))
    peft: dict[str, Any] = {
        "peft_type": "LORA",
        "r": lora_rank,
        "lora_alpha": lora_rank,
        "target_modules": sorted({module.name for module in adapted}),
    }
    peft["use_dora"] = form.dora
    findings = Findings()
    config = parse_config(msgspec.json.encode(peft), findings)
    findings.raise_if_any()
    assert config is not None
    nowhere = TensorInfo("", "BF16", (), 0, 0)  # a layout needs ranks alone
    modules = tuple(
        ModuleLora(
            of.layer, of.name, lora_rank, 1.0, nowhere, nowhere, nowhere if form.dora else None
        )
        for of in adapted
    )
    head = TensorInfo("", "BF16", (base.vocab_size, base.hidden_size), 0, 0)
    tables = (OwnTable("lm_head", head, ()),) if form.own_heads else ()
    adapter = LoraTensors(config, modules, tables=tables)
    return make_layout(adapter, base, digest, dtype, EXTENT_BYTES)


def shared_base(model: ModelSpec, shards: int) -> BaseSpec:
    """Describes the whole model, which `shards` devices share, to adapters."""
    return msgspec.structs.replace(base_spec(model, "0" * 64, ("base",)), shards=shards)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """An engine's capacity: `adapters` of rank `lora_rank` on the device, sequences of up to
    `tokens` tokens, prompt and output. max_running: sequences computed at once. cached: sequences
    in the KV cache at once, None = as many as the rest of a GPU holds. step_tokens: the most of a
    step. form: of adapters. shards: devices that share the model."""

    adapters: int
    lora_rank: int
    tokens: int
    cached: int | None
    max_running: int
    max_waiting: int
    step_tokens: int
    form: MadeForm = PLAIN
    kv_dtype: KvDtype = "auto"
    shards: int = 1
    has_drafts: bool = False
    batch_invariant: bool = False

    def config(
        self, folder: Path, device: Literal["cpu", "cuda"], dtype: SlabDtype
    ) -> EngineConfig:
        """The config of an engine with room for the grid. Raises CheckpointError."""
        whole = read_config(folder)
        model = sharded(whole, self.shards)
        # A page more, as an admission keeps some in reserve.
        context = min((-(-self.tokens // PAGE_SIZE) + 1) * PAGE_SIZE, model.max_context)
        kv_memory = 0
        if self.cached is not None:  # every sequence at full length, and as much again
            in_all = len(page_groups(model).windows) * page_token_bytes(model, dtype, self.kv_dtype)
            kv_memory = 2 * self.cached * context * in_all + _SPARE_KV
        base = shared_base(whole, self.shards)
        plain, slab = (
            lora_layout(base, "0" * 64, self.lora_rank, dtype, form)
            for form in (self.form._replace(own_heads=0), self.form)
        )
        adapters = max(self.adapters, 1) * plain.shard_nbytes
        adapters += self.form.own_heads * (slab.shard_nbytes - plain.shard_nbytes)
        return EngineConfig(
            model_path=str(folder),
            device=device,
            dtype=dtype,
            page_size=PAGE_SIZE,
            kv_memory=kv_memory,
            adapter_memory=adapters + EXTENT_BYTES,
            host_arena_bytes=slab.nbytes,
            extent_bytes=EXTENT_BYTES,
            max_context=context,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_step_tokens=self.step_tokens,
            kv_dtype=self.kv_dtype,
            batch_invariant=self.batch_invariant,
            adapter_slots=max(ADAPTER_SLOTS, self.adapters) if self.adapters else 0,
            shards=self.shards,
            dora_graphs=self.form.dora,
            max_draft=int(self.has_drafts),
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Work for an engine. requests sequences at once, spread over `adapters` distinct adapters of
    `rank` (0 = none). grammars: each holds one of the first requests. vector: prompts are read
    for that, and nothing is generated. draft_tokens: checked for each sequence in each step.
    """

    requests: int
    adapters: int
    rank: int
    prompt_tokens: int
    output_tokens: int
    sampling: SamplingParams = GREEDY
    grammars: tuple[str, ...] = ()
    vector: VectorParams | None = None
    draft_tokens: int = 0


def adapter_digest(rank: int, number: int) -> str:
    """Names a made-up adapter of a rank."""
    return f"{rank}-{number}".rjust(64, "0")


def _vocabulary(folder: Path, vocab_size: int, ends: tuple[int, ...]) -> Vocabulary:
    """Reads the folder's vocabulary, or makes one up where it has none."""
    if (folder / "tokenizer.json").is_file():
        return read_vocabulary(folder, vocab_size, ends)
    return make_vocabulary(tokenizer_json(vocab_size, ends), vocab_size, ends)


class FixedDrafting(Drafting):
    """Drafts `draft_tokens` for each decode that has room; next to no token of them is right."""

    def __init__(self, draft_tokens: int) -> None:
        super().__init__(draft_tokens, max_bytes=0)

    def _worth(self, sequence: rows.Sequence, most: int, least: float) -> list[int]:
        return [_DRAFTED] * min(most, self._max_draft)


class OfflineEngine:
    """Executor, scheduler and step loop as in an engine process, driven by calls.

    All adapters are copies of one slab, which fills the host arena with numbers of N(0, 0.02^2) in
    the run's dtype. Each has its own place on the device.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        batches: Sequence[int] | None,
        form: MadeForm = PLAIN,
    ) -> None:
        """Starts an engine for measurements, without a server. batches: padded batch sizes that
        decode graphs are captured for; None = a server's. form: of adapters, as of the sizes
        that config was made of.
        """
        self.config, self._form = config, form
        model = read_config(folder)
        self.base = shared_base(model, config.shards)
        self.vocab_size = model.vocab_size
        self._undo = ExitStack()
        self.executor = make_executor(config, batches, self._undo)
        waiting = SchedulerConfig(max_waiting=config.max_waiting)
        self._scheduler = Scheduler(self.executor.limits, waiting)
        limits = self.executor.limits
        load = partial(_vocabulary, folder, limits.vocab_size, limits.eos_token_ids)
        self._constraints = make_constraints(config.grammar, limits, load)
        self._constraints.open()
        self._constraints.wait_for_vocabulary()  # its thread would slow what is timed
        self._runs = 0
        self._layouts: dict[tuple[int, MadeForm], SlabLayout] = {}  # by rank
        gc.collect()
        gc.freeze()  # as an engine process does: what lasts is looked at by no collection

    def close(self) -> None:
        self._constraints.close()
        self.executor.close()
        self._undo.close()
        gc.unfreeze()

    def run(self, load: Load, note: Note = lambda _: None) -> float:
        """Returns the seconds from the first request to the last token. note: gets each step's
        report. Raises BenchError for errors."""
        self._runs += 1
        self._scheduler.drafting = FixedDrafting(load.draft_tokens)
        requests = [self._request(load, i) for i in range(load.requests)]
        started = time.perf_counter()
        channel = _Calls(requests, lambda digest: self._staged(digest, load.rank), note)
        depth = 2 if self.config.device == "cuda" else 1
        EngineLoop(self.executor, self._scheduler, channel, depth, self._constraints).run()
        return time.perf_counter() - started

    def load_adapters(self, count: int, rank: int) -> float:
        """Brings adapters to the device; returns the seconds."""
        vector = None if self.executor.limits.writes else VectorParams()
        return self.run(Load(count, count, rank, 1, 1, vector=vector)) if count else 0.0

    def _request(self, load: Load, number: int) -> Submit:
        """Makes a request for exactly so many tokens, where no grammar ends before."""
        adapter = adapter_digest(load.rank, number % load.adapters) if load.adapters else None
        seed = 7919 * self._runs + number
        step = 1 + seed % 97
        prompt = [(seed + step * i) % (self.vocab_size - 1) for i in range(load.prompt_tokens)]
        held = number < len(load.grammars)
        grammar = load.grammars[number] if held else load.sampling.grammar
        sampling = msgspec.structs.replace(
            load.sampling,
            max_tokens=load.output_tokens if load.vector is None else 0,
            grammar=grammar,
            ignore_eos=not grammar,
        )
        salt = str(self._runs)
        request = GenerateRequest(
            str(number), 0, 0, adapter, prompt, [], sampling, seed, salt=salt, drafts=""
        )
        return Submit(number, msgspec.structs.replace(request, vector=load.vector))

    def _staged(self, digest: str, rank: int) -> SlabStaged:
        first = {adapter_digest(rank, number) for number in range(self._form.own_heads)}
        form = self._form if digest in first else self._form._replace(own_heads=0)
        if (rank, form) not in self._layouts:
            dtype = self.config.dtype
            self._layouts[rank, form] = lora_layout(self.base, digest, rank, dtype, form)
        layout = msgspec.structs.replace(self._layouts[rank, form], digest=digest)
        places = fit(bytearray([FREE]) * sum(layout.all_runs), layout.all_runs)
        assert places is not None
        return SlabStaged(layout, places)


class _Calls:
    """The engine's channel: submits everything, answers NeedSlab, ends the loop after the last."""

    def __init__(
        self,
        requests: Sequence[Submit],
        staged: Callable[[str], SlabStaged],
        note: Note,
    ) -> None:
        self._inbox: deque[ToEngine] = deque(requests)
        self._unfinished = len(requests)
        self._staged = staged
        self._note = note

    def receive(self, wait_s: float | None) -> ToEngine | None:
        if self._inbox:
            return self._inbox.popleft()
        if not self._unfinished:
            return Shutdown()
        if wait_s != 0:
            time.sleep(_IDLE_S)
        return None

    def send(self, message: FromEngine) -> None:
        if isinstance(message, NeedSlab):
            self._inbox.append(self._staged(message.digest))
        elif isinstance(message, StepOutput):
            self._note(message)
            for _, event in ((e.key, e.event) for e in message.events):
                if event.error is not None:
                    raise BenchError(f"a request failed: {event.error}: {event.message}")
                self._unfinished -= event.finish is not None
