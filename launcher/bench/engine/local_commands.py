"""The actions of `loraplex bench` that make a random model and adapters, and time adapter loads."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from loraplex.launcher.bench.load.commands import add_folders, names_in
from loraplex.launcher.bench.output import print_fields
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import lora_rank, whole
from loraplex.launcher.options import OptionError

DTYPES = ("bfloat16", "float16", "float32")


def add_local_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """`make-model`, `adapter-copies` and `cold-adapters`."""
    make = actions.add_parser("make-model", help="a model and adapters with random weights")
    _add_make(make)
    make.set_defaults(run=run_make)
    copies = actions.add_parser("adapter-copies", help="adapters from host memory to the device")
    _add_copies(copies)
    copies.set_defaults(run=run_copies)
    cold = actions.add_parser("cold-adapters", help="adapters from a folder to host memory")
    _add_cold(cold)
    cold.set_defaults(run=run_cold)


def add_config(parser: Parser) -> None:
    parser.add_argument(
        "--config",
        required=True,
        metavar="FOLDER",
        help="folder with a config.json, or a known model (llama-3.1-8b, gemma-2-9b)",
    )


def _add_make(parser: Parser) -> None:
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


def run_make(arguments: argparse.Namespace) -> None:
    """Raises OptionError, BenchError, CheckpointError, OSError."""
    from loraplex.launcher.bench.engine.made_model import Maker
    from loraplex.launcher.bench.engine.offline import check_device, model_folder

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


def _add_copies(parser: Parser) -> None:
    parser.add_argument("--config", required=True, metavar="FOLDER", help="as of make-model")
    parser.add_argument("--rank", type=lora_rank, default=16)
    parser.add_argument("--adapters", type=whole(1), default=32, help="that lie in host memory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def run_copies(arguments: argparse.Namespace) -> None:
    """Raises BenchError, CheckpointError."""
    from loraplex.launcher.bench.engine.adapter_copies import measure
    from loraplex.launcher.bench.engine.offline import check_device, model_folder

    check_device(arguments.device)
    folder = model_folder(arguments.config)
    device, dtype = arguments.device, arguments.dtype
    times = measure(folder, device, dtype, arguments.rank, arguments.adapters)
    print_fields(times, arguments.json, "10.3f")


def _add_cold(parser: Parser) -> None:
    parser.add_argument("--config", required=True, metavar="FOLDER", help="as of make-model")
    add_folders(parser, required=True, count=4)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the slabs")
    parser.add_argument("--rounds", type=whole(1), default=5, help="the best counts")


def run_cold(arguments: argparse.Namespace) -> None:
    """Raises AdapterError, BenchError, CheckpointError, OSError."""
    from loraplex.launcher.bench.engine.cold_adapters import measure
    from loraplex.launcher.bench.engine.offline import model_folder

    folder, names = model_folder(arguments.config), names_in(arguments)
    times = measure(folder, arguments.adapters_in, names, arguments.dtype, arguments.rounds)
    print_fields(times, arguments.json, "10.3f")
