"""`loraplex parity MODEL ADAPTER… --prompts F`: the server's log-probabilities beside PEFT's."""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loraplex.adapters.common import extras
from loraplex.adapters.errors import CommandError
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.config import batch_options
from loraplex.launcher.convert.base_class import base_class
from loraplex.launcher.evaluation import command as evaluation
from loraplex.launcher.evaluation.questions import (
    LineAnswer,
    question_id,
    questions,
    read_cases,
)
from loraplex.launcher.options import OptionError
from loraplex.launcher.router_client import json_text, table

_FIRST_BUCKET = 16
_GROWTH = 4

ABOUT = """\
Compare the log-probabilities of a server with those of transformers and PEFT, token by token:
of prompts, and of the server's greedy answers.

  loraplex parity ./llama ./lora --prompts prompts.jsonl --peft-dtype float32 --bound 0.05
  loraplex parity ./llama ./rank-8 ./rank-64 --prompts prompts.jsonl

Prompts are lines of JSON with `prompt` or `messages`. The command starts a server, by the options
of `loraplex serve`, then computes the same tokens by PEFT on the same device.
Needs pip install 'loraplex[serve,convert]'.
"""


class Difference(msgspec.Struct, frozen=True):
    """One token's. position: from 0, the prompt's first. nats: the server's less the other's.

    family: of the base. rank: of the adapter, from the least to the greatest; "" = it has none.
    """

    position: int
    is_output: bool
    nats: float
    family: str = ""
    rank: str = ""


class Spread(msgspec.Struct, frozen=True):
    """Absolute differences of some tokens, in nats."""

    tokens_at: str
    tokens: int
    mean: float
    max: float


def bucket(position: int) -> tuple[int, int]:
    """The first position of a token's bucket, and the one after its last."""
    low, high = 0, _FIRST_BUCKET
    while position >= high:
        low, high = high, high * _GROWTH
    return low, high


def spreads(differences: Sequence[Difference]) -> list[Spread]:
    """Spreads of all tokens, prompts, answers, each family and rank, and filled buckets."""
    parts = {
        "all": list(differences),
        "prompt": [one for one in differences if not one.is_output],
        "answer": [one for one in differences if one.is_output],
    }
    for what in ("family", "rank"):
        for name in dict.fromkeys(getattr(one, what) for one in differences):
            if name:
                parts[f"{what} {name}"] = [o for o in differences if getattr(o, what) == name]
    for low, high in sorted({bucket(one.position) for one in differences}):
        here = [one for one in differences if low <= one.position < high]
        parts[f"{low}-{high - 1}"] = here
    return [_spread(name, [abs(one.nats) for one in part]) for name, part in parts.items()]


def _spread(name: str, nats: Sequence[float]) -> Spread:
    return Spread(name, len(nats), sum(nats) / max(1, len(nats)), max(nats, default=0.0))


def as_text(found: Iterable[Spread]) -> str:
    rows = [["tokens at", "tokens", "mean", "max"]]
    rows += [[one.tokens_at, str(one.tokens), f"{one.mean:.2e}", f"{one.max:.2e}"] for one in found]
    return "\n".join(table(rows)) + "\n"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hub id or folder")
    parser.add_argument("what", metavar="ADAPTER", nargs="+", type=Path, help="folder")
    parser.add_argument(
        "--prompts", dest="lines", metavar="F", type=Path, required=True, help="lines, in JSON"
    )
    parser.add_argument("--max-tokens", metavar="N", type=int, default=32, help="of an answer [32]")
    parser.add_argument(
        "--peft-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="what PEFT computes in; --dtype is the server's [bfloat16]",
    )
    parser.add_argument(
        "--bound", metavar="NATS", type=float, help="the exit code is 1 if a difference is larger"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_options(parser, batch_options())


def run(arguments: argparse.Namespace, api_key: str, environ: Mapping[str, str]) -> int:
    """Compares, and prints the table. Returns the exit code: 1 = beyond the bound. Raises
    CommandError, OptionError, ModuleNotFoundError, and what `serve` raises."""
    for module in ("torch", "transformers", "peft"):
        extras.require(module)
    for folder in arguments.what:
        if not (folder / CONFIG_FILE).exists():
            raise OptionError(f"ADAPTER must be a folder with {CONFIG_FILE}: {folder} is none")
    cases = read_cases(arguments.lines, "logprobs")
    folders = {f"adapter-{number}": each for number, each in enumerate(arguments.what, 1)}
    refs = [f"{name}={folder.resolve()}" for name, folder in folders.items()]
    given = [*(arguments.adapters or ()), *refs]
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        more = {"out": Path(folder), "adapters": given, "url": None, "restart": False}
        batch = argparse.Namespace(**vars(arguments) | more)
        asked = questions("logprobs", folders, cases, arguments.max_tokens)
        answers = evaluation.answers(batch, api_key, environ, "answers", asked)
    if fault := next((answer.fault for answer in answers.values() if answer.fault), None):
        raise CommandError(f"a prompt has no answer: {fault}")
    differences: list[Difference] = []
    for name, adapter in folders.items():
        own = [answers[question_id(name, number)] for number in range(1, len(cases) + 1)]
        differences += _differences(arguments, adapter, own)
    found = spreads(differences)
    sys.stdout.write(json_text(found) if arguments.json else as_text(found))
    return int(arguments.bound is not None and found[0].max > arguments.bound)


def _differences(
    arguments: argparse.Namespace, adapter: Path, answers: Iterable[LineAnswer]
) -> Iterator[Difference]:
    model = _peft_model(arguments, adapter)
    family, rank = model.config.model_type, _rank(model.active_peft_config)
    for answer in answers:
        served = [*answer.logprobs, *answer.output_logprobs]
        count = len(answer.prompt_ids)
        pairs = zip(served, _logprobs(model, answer), strict=True)
        for position, (ours, theirs) in enumerate(pairs, 1):
            yield Difference(position, position >= count, ours - theirs, family, rank)


def _rank(config: Any) -> str:
    """The ranks of an adapter by its config: one, or the least and the greatest."""
    ranks = {getattr(config, "r", 0), *(getattr(config, "rank_pattern", None) or {}).values()}
    return "-".join(str(rank) for rank in sorted({min(ranks), max(ranks)}) if rank)


def _peft_model(arguments: argparse.Namespace, adapter: Path) -> Any:
    """The base with the adapter, where a server would compute it."""
    import torch
    from peft import PeftModel

    dtype = getattr(torch, arguments.peft_dtype)
    kind = base_class(arguments.model, revision=arguments.revision)
    model: Any = kind.from_pretrained(arguments.model, revision=arguments.revision, dtype=dtype)
    is_on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    model = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
    return model.to("cuda" if is_on_gpu else "cpu", dtype).eval()


def _logprobs(model: Any, answer: LineAnswer) -> list[float]:
    """Each token's after the first, in nats."""
    import torch

    ids = torch.tensor([[*answer.prompt_ids, *answer.output_ids]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1].float()
    rows = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    return [float(value) for value in rows[:, 0]]
