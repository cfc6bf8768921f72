"""The actions of `loraplex bench` that run the engine or its kernels in this process."""

import argparse
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loraplex.launcher.bench.engine.local_commands import DTYPES, add_config
from loraplex.launcher.bench.load.commands import add_draws, drawn
from loraplex.launcher.bench.output import print_fields, print_points
from loraplex.launcher.command_line import Parser
from loraplex.launcher.option_types import above, lora_rank, lora_ranks, whole, wholes
from loraplex.launcher.options import OptionError
from loraplex.server.engine.admission import bad_sampling
from loraplex.server.protocol import SamplingParams

if TYPE_CHECKING:
    from loraplex.launcher.bench.engine.grid import Grid

_STEP_TOKENS = 8192
_MOST_ADAPTERS = 100_000


def add_engine_commands(actions: "argparse._SubParsersAction[Parser]") -> None:
    """`decode`, `prefill`, `vectors`, `throughput` and those of kernels and masks."""
    for name, about, run in (
        ("decode", "time of a decode step", run_decode),
        ("prefill", "prompt tokens a second", run_prefill),
    ):
        parser = actions.add_parser(name, help=about)
        _add_grid(parser, name == "decode")
        parser.set_defaults(run=run)
    vectors = actions.add_parser("vectors", help="prompts read for vectors, beside prefill")
    _add_grid(vectors, is_decode=False)
    pooling = ("last", "mean")
    vectors.add_argument("--pooling", choices=pooling, default="last", help="of tokens [last]")
    vectors.set_defaults(run=run_vectors, batch=(64,), adapters=(0, 16), prompt_tokens=512)
    _add_throughput(actions.add_parser("throughput", help="the load of `serve` without a server"))
    kernels = actions.add_parser("lora-kernels", help="LoRA's share of a decode step")
    kernels.add_argument("--rank", action="append", choices=("16", "64", "mix"))
    kernels.add_argument("--replays", type=whole(1), default=20)
    kernels.set_defaults(run=run_lora_kernels)
    _add_prompt_attention(actions.add_parser("prompt-attention", help="one layer's, of prompts"))
    masks = actions.add_parser("masks", help="what grammars cost the host")
    masks.add_argument("--vocabulary", type=whole(300), default=128_256, help="tokens [128256]")
    masks.add_argument("--schemas", type=whole(1), default=64, help="all different [64]")
    masks.add_argument("--threads", type=whole(1), default=4, help="that fill masks [4]")
    masks.set_defaults(run=run_masks)


def _add_prompt_attention(parser: Parser) -> None:
    parser.add_argument("--heads", type=whole(1), default=32, help="of queries [32]")
    parser.add_argument("--kv-heads", type=whole(1), default=8, help="[8]")
    parser.add_argument("--head-size", type=whole(16, 256), default=128, help="[128]")
    parser.add_argument("--window", type=whole(1), help="tokens that a token sees [all]")
    parser.add_argument("--softcap", type=above(0.0), help="of scores [none]")
    parser.add_argument("--sinks", action="store_true", help="with a sink for each head")
    parser.add_argument("--chunks", type=wholes(1), metavar="N,…", default=(1, 4))
    parser.add_argument("--tokens", type=wholes(1), metavar="N,…", default=(512, 2048, 8192))
    parser.add_argument(
        "--before", type=wholes(0), metavar="N,…", default=(0,), help="tokens before a chunk [0]"
    )
    parser.add_argument("--replays", type=whole(1), default=20)
    parser.set_defaults(run=run_prompt_attention)


def _add_engine(parser: Parser) -> None:
    """Of what runs the engine in this process."""
    add_config(parser)
    parser.add_argument(
        "--dummy-weights", action="store_true", required=True, help="random weights (the only kind)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def _add_step_tokens(parser: Parser) -> None:
    parser.add_argument(
        "--step-tokens",
        type=whole(1),
        default=_STEP_TOKENS,
        help=f"most of a step [{_STEP_TOKENS}]",
    )


def _add_throughput(parser: Parser) -> None:
    _add_engine(parser)
    parser.add_argument(
        "--adapters", type=whole(0, _MOST_ADAPTERS), default=0, help="how many are drawn from [0]"
    )
    parser.add_argument("--rank", type=lora_rank, default=16, help="of every adapter [16]")
    parser.add_argument(
        "--room", type=whole(1), help="adapters that the device has room for [all, at most 256]"
    )
    parser.add_argument("--max-running", type=whole(1), default=256, help="sequences at once [256]")
    _add_step_tokens(parser)
    add_draws(parser)
    parser.set_defaults(run=run_throughput)


def _add_grid(parser: Parser, is_decode: bool) -> None:
    _add_engine(parser)
    batches = (1, 8, 32) if is_decode else (4, 16)
    parser.add_argument("--batch", type=wholes(1), metavar="N,…", default=batches)
    parser.add_argument("--adapters", type=wholes(0), metavar="N,…", default=(0, 1))
    parser.add_argument("--rank", type=lora_ranks, metavar="N,…", default=(16,))
    parser.add_argument("--kv-dtype", choices=("auto", "fp8"), default="auto", help="[auto]")
    parser.add_argument("--adapt-experts", action="store_true", help="adapters change experts too")
    parser.add_argument("--dora", action="store_true", help="adapters are DoRA's")
    parser.add_argument("--own-heads", type=whole(0), default=0, help="adapters that have one [0]")
    parser.add_argument("--tp", type=whole(1), default=1, help="devices that share the model [1]")
    parser.add_argument("--prompt-tokens", type=whole(1), default=128 if is_decode else 2048)
    if is_decode:
        parser.add_argument("--output-tokens", type=whole(1), default=144)
        parser.add_argument(
            "--constrained",
            type=wholes(0),
            metavar="N,…",
            default=(0,),
            help="sequences of --batch that write JSON of a schema each, all different [0]",
        )
        parser.add_argument(
            "--draft",
            type=wholes(0, 16),
            metavar="N,…",
            default=(0,),
            help="tokens of a draft that each sequence checks in each step, all wrong [0]",
        )
    else:
        _add_step_tokens(parser)
    parser.add_argument(
        "--sampling",
        default="{}",
        metavar="JSON",
        help='how tokens are chosen, such as \'{"temperature": 0.8, "top_p": 0.95}\' (default:'
        " greedily)",
    )


def _model(arguments: argparse.Namespace) -> tuple[Path, Any, Any]:
    """Its folder, device and dtype. Raises BenchError."""
    from loraplex.launcher.bench.engine.offline import check_device, model_folder

    check_device(arguments.device)
    return model_folder(arguments.config), arguments.device, arguments.dtype


def _grid(arguments: argparse.Namespace, output_tokens: int, step_tokens: int) -> "Grid":
    """Raises OptionError, BenchError."""
    from loraplex.launcher.bench.engine.grid import Grid
    from loraplex.launcher.bench.engine.offline import MadeForm

    grid = Grid(
        *_model(arguments),
        batches=arguments.batch,
        adapters=arguments.adapters,
        ranks=arguments.rank,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=output_tokens,
        step_tokens=step_tokens,
        sampling=_sampling(arguments.sampling),
        constrained=getattr(arguments, "constrained", (0,)),
        drafts=getattr(arguments, "draft", (0,)),
        form=MadeForm(arguments.adapt_experts, arguments.dora, arguments.own_heads),
        kv_dtype=arguments.kv_dtype,
        shards=arguments.tp,
    )
    if min(grid.constrained) > max(grid.batches):
        raise OptionError("no --batch is as large as one of --constrained")
    if not any(grid.points()):
        raise OptionError("no --batch is as large as one of --adapters")
    return grid


def _sampling(text: str) -> SamplingParams:
    """Greedy where it does not say. Raises OptionError."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        unknown = given.keys() - set(SamplingParams.__struct_fields__)
        if unknown:
            raise OptionError(f"--sampling: {', '.join(sorted(unknown))}: not known")
        untyped = SamplingParams(**{"temperature": 0.0, **given})
        params = msgspec.convert(msgspec.to_builtins(untyped), SamplingParams)  # checks types
    except msgspec.MsgspecError as error:
        raise OptionError(f"--sampling: {error}") from error
    if problem := bad_sampling(params):
        raise OptionError(f"--sampling: {problem}")
    return params


def run_decode(arguments: argparse.Namespace) -> None:
    from loraplex.launcher.bench.engine.grid import SHORT_OUTPUT, decode, table

    if arguments.output_tokens <= SHORT_OUTPUT:
        raise OptionError(f"--output-tokens must be more than {SHORT_OUTPUT}")
    grid = _grid(arguments, arguments.output_tokens, _STEP_TOKENS)
    print_points(decode(grid), arguments.json, table)


def run_prefill(arguments: argparse.Namespace) -> None:
    from loraplex.launcher.bench.engine.grid import prefill, table

    print_points(prefill(_grid(arguments, 1, arguments.step_tokens)), arguments.json, table)


def run_vectors(arguments: argparse.Namespace) -> None:
    from loraplex.launcher.bench.engine.grid import table, vectors

    grid = _grid(arguments, 1, arguments.step_tokens)
    print_points(vectors(grid, arguments.pooling), arguments.json, table)


def run_throughput(arguments: argparse.Namespace) -> None:
    """Raises BenchError, CheckpointError, ConfigError."""
    from loraplex.launcher.bench.engine.throughput import (
        MeasuredEngine,
        adapters_of,
        measure,
        summary_text,
    )

    engine = MeasuredEngine(
        *_model(arguments),
        rank=arguments.rank,
        room=arguments.room,
        max_running=arguments.max_running,
        step_tokens=arguments.step_tokens,
    )
    workload = drawn(arguments, adapters_of(arguments.rank, arguments.adapters))
    summary = measure(engine, workload).summary()
    print(msgspec.json.encode(summary).decode() if arguments.json else summary_text(summary))


def run_lora_kernels(arguments: argparse.Namespace) -> None:
    """Raises BenchError."""
    from loraplex.launcher.bench.engine.lora_kernels import POINTS, RANKS, measure, table
    from loraplex.launcher.bench.engine.offline import require_cuda

    require_cuda("bench lora-kernels needs one")
    results = measure(POINTS, arguments.rank or [*RANKS], arguments.replays)
    print_points(results, arguments.json, table)


def run_prompt_attention(arguments: argparse.Namespace) -> None:
    """Raises BenchError."""
    from loraplex.launcher.bench.engine.offline import require_cuda
    from loraplex.launcher.bench.engine.prompt_times import PromptLayer, measure, table

    require_cuda("bench prompt-attention needs one")
    layer = PromptLayer(
        arguments.heads,
        arguments.kv_heads,
        arguments.head_size,
        arguments.window,
        arguments.softcap,
        arguments.sinks,
    )
    points = tuple(product(arguments.chunks, arguments.tokens, arguments.before))
    print_points(measure(layer, points, arguments.replays), arguments.json, table)


def run_masks(arguments: argparse.Namespace) -> None:
    from loraplex.launcher.bench.engine.mask_times import measure

    times = measure(arguments.vocabulary, arguments.schemas, arguments.threads)
    print_fields(times, arguments.json, "10.2f")
