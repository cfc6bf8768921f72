"""A model folder and adapter folders with random weights on disk, to load a server without real
ones.

Contents are drawn on the device and written by threads, so that the disk is the limit. Every
adapter's numbers are its own.
"""

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters.base import BaseSpec
from loraplex.launcher.bench.commands import DTYPES, add_config
from loraplex.launcher.bench.engine.offline import (
    adapted_modules,
    check_device,
    model_folder,
    tokenizer_json,
)
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import lora_rank, whole
from loraplex.launcher.options import OptionError
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.model.checkpoint.model_files import CONFIG_FILE, INDEX_FILE
from loraplex.server.model.spec.base_spec import base_spec

# How safetensors spells them. In eight bits an adapter takes half the disk; it is packed as ever.
STORED = {
    "float32": (torch.float32, "F32"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float8": (torch.float8_e4m3fn, "F8_E4M3"),
}
_SHARD_BYTES = 2 << 30
_PIECE_BYTES = 64 << 20
_SAY_S = 5.0
_STD = 0.02
_ALIGNMENT = 8
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

Shapes = Mapping[str, tuple[int, ...]]
# A tensor's name, its shape and the generator of its numbers.
Draw = Callable[[str, tuple[int, ...], torch.Generator], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """files of `nbytes` together, in `seconds`."""

    files: int
    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9) / 1e9


class Maker:
    """device: where numbers are drawn. threads: that write files at once."""

    def __init__(self, config: Path, dtype: str, device: str, threads: int) -> None:
        """config: a folder with a config.json. dtype: one of STORED."""
        self._config_text = (config / CONFIG_FILE).read_text("utf-8")
        self._model = read_config(config)
        self._dtype, self._stored = STORED[dtype]
        self._device = torch.device(device)
        self._threads = threads
        self._written = 0  # bytes, about

    @property
    def base(self) -> BaseSpec:
        return base_spec(self._model, "0" * 64, ("base",))

    def model(self, folder: Path) -> Written:
        """Writes a model's folder: configuration, tokenizer, sharded weights.

        Raises FileExistsError.
        """
        folder.mkdir(parents=True)
        shards = list(_shards(self._model.tensors(), self._dtype.itemsize))
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        _write_json(folder / CONFIG_FILE, json.loads(self._config_text))
        _write_json(folder / INDEX_FILE, {"weight_map": _weight_map(names, shards)})
        text = tokenizer_json(self._model.vocab_size, self._model.eos_token_ids)
        (folder / "tokenizer.json").write_text(text, "utf-8")
        _write_json(folder / "tokenizer_config.json", {"chat_template": CHAT_TEMPLATE})

        shapes = dict(zip(names, shards, strict=True))

        def write(name: str) -> int:
            return self._weights(folder / name, shapes[name], name, _model_tensor)

        return self._all(write, names)

    def adapters(self, folder: Path, names: Sequence[str], base: str, lora_rank: int) -> Written:
        """Writes PEFT folders of that rank on all projections. base: the base model's name.

        Raises FileExistsError.
        """
        shapes = _lora_shapes(self.base, lora_rank)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": lora_rank,
            "lora_alpha": lora_rank,
            "target_modules": sorted({module.name for module in adapted_modules(self.base)}),
        }

        def write(name: str) -> int:
            own = folder / name
            own.mkdir(parents=True)
            _write_json(own / "adapter_config.json", config)
            return self._weights(own / "adapter_model.safetensors", shapes, name, _normal)

        return self._all(write, names)

    def _all(self, write: Callable[[str], int], names: Iterable[str]) -> Written:
        started = time.perf_counter()
        with ThreadPoolExecutor(self._threads, "write") as pool:
            files = [pool.submit(write, name) for name in names]
            while open_files := wait(files, _SAY_S).not_done:
                size = f"{self._written / 1e9:.1f} GB, {len(open_files)} files to go"
                sys.stderr.write(f"loraplex: {size}, {time.perf_counter() - started:.0f} s\n")
            sizes = [file.result() for file in files]
        return Written(len(sizes), sum(sizes), time.perf_counter() - started)

    def _weights(self, path: Path, shapes: Shapes, name: str, draw: Draw) -> int:
        """Writes a safetensors file; returns its size. name: seeds its numbers. Memory holds a few
        tensors at a time."""
        dtype = self._dtype
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        generator = _generator(self._device).manual_seed(seed)
        with torch.inference_mode(), path.open("xb", buffering=0) as file:
            file.write(_header(shapes, self._stored, dtype.itemsize))
            pending, nbytes = [], 0
            for tensor, shape in shapes.items():
                pending.append(draw(tensor, shape, generator).to(dtype).flatten())
                nbytes += pending[-1].nbytes
                if nbytes >= _PIECE_BYTES:
                    _write_all(file, pending)
                    self._written += nbytes
                    pending, nbytes = [], 0
            _write_all(file, pending)
            return file.tell()


_local = threading.local()


def _generator(device: torch.device) -> torch.Generator:
    """Keeps one a thread: making one takes longer on a GPU than drawing a tensor's numbers."""
    if getattr(_local, "device", None) != device:
        _local.device, _local.generator = device, torch.Generator(device)
    generator: torch.Generator = _local.generator
    return generator


def _normal(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """float32 of this shape on the generator's device, N(0, 0.02^2)."""
    drawn = torch.empty(shape, device=generator.device, dtype=torch.float32)
    return drawn.normal_(std=_STD, generator=generator)


def _model_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """float32 of this shape: norms are ones and biases zero, so that activations stay in range."""
    if len(shape) == 1:
        fill = torch.zeros if name.endswith(".bias") else torch.ones
        return fill(shape, device=generator.device)
    return _normal(name, shape, generator)


def _lora_shapes(base: BaseSpec, lora_rank: int) -> dict[str, tuple[int, ...]]:
    """Lists PEFT's tensors: A `[lora_rank, in_features]`, B `[out_features, lora_rank]`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in adapted_modules(base):
        stem, shape = f"base_model.model.{module.path}", module.shape
        shapes[f"{stem}.lora_A.weight"] = (lora_rank, shape.in_features)
        shapes[f"{stem}.lora_B.weight"] = (shape.out_features, lora_rank)
    return shapes


def _shards(shapes: Shapes, item_bytes: int) -> Iterable[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    nbytes = 0
    for name, shape in shapes.items():
        if nbytes >= _SHARD_BYTES:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = shape
        nbytes += torch.Size(shape).numel() * item_bytes
    yield shard


def _weight_map(names: Sequence[str], shards: Sequence[Shapes]) -> dict[str, str]:
    return {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}


def _header(shapes: Shapes, stored: str, item_bytes: int) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + torch.Size(shape).numel() * item_bytes
        entries[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(file: Any, tensors: Sequence[torch.Tensor]) -> None:
    """tensors: `[any]` of one dtype and device. Written as one piece: copying many small ones from
    a GPU is slow, and so is writing them."""
    if not tensors:
        return
    piece = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
    left = memoryview(piece.cpu().numpy())  # type: ignore[arg-type]
    while left:
        left = left[file.write(left) :]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")


def add_arguments(parser: Parser) -> None:
    """Adds the model, the adapters and their forms."""
    add_config(parser)
    parser.add_argument("--model", type=Path, metavar="DIR", help="write the model into it")
    parser.add_argument("--adapters-in", type=Path, metavar="DIR", help="and adapter folders here")
    parser.add_argument("--adapters", type=whole(0), default=0, help="how many")
    parser.add_argument("--first", type=whole(0), default=0, help="number of the first")
    parser.add_argument("--rank", type=lora_rank, default=16)
    parser.add_argument("--base-name", default="base", help="base that the adapters name")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model")
    parser.add_argument("--adapter-dtype", choices=(*DTYPES, "float8"), default="bfloat16")
    parser.add_argument("--threads", type=whole(1), default=8, help="that write")


def run(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError, CheckpointError, OSError."""
    if (arguments.adapters_in is None) != (not arguments.adapters):
        raise OptionError("--adapters-in and --adapters need each other: where, and how many")
    if arguments.model is None and not arguments.adapters:
        raise OptionError("nothing to make: give --model, or --adapters-in with --adapters")
    check_device(arguments.device)
    folder = model_folder(arguments.config)
    made, how = {}, (arguments.device, arguments.threads)
    if arguments.model is not None:
        made["model"] = Maker(folder, arguments.dtype, *how).model(arguments.model)
    if arguments.adapters:
        maker = Maker(folder, arguments.adapter_dtype, *how)
        numbers = range(arguments.first, arguments.first + arguments.adapters)
        names = [f"a{number:04}" for number in numbers]
        base, rank = arguments.base_name, arguments.rank
        made["adapters"] = maker.adapters(arguments.adapters_in, names, base, rank)
    for what, written in made.items():
        rate = round(written.gb_per_s, 2)
        if arguments.json:
            print(json.dumps({"made": what, **asdict(written), "gb_per_s": rate}))
        else:
            size = f"{written.nbytes / 1e9:.2f} GB in {written.files} files"
            print(f"{what}: {size}, {written.seconds:.1f} s, {rate} GB/s")
