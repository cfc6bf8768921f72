"""`loraplex parity MODEL ADAPTER --prompts F`: the server's log-probabilities beside PEFT's."""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loraplex.adapters.common import extras
from loraplex.adapters.errors import CommandError
from loraplex.adapters.peft.config import CONFIG_FILE
from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.config import batch_options
from loraplex.launcher.evaluation import command as evaluation
from loraplex.launcher.evaluation.questions import LineAnswer, questions, read_cases
from loraplex.launcher.options import OptionError
from loraplex.launcher.parity.differences import Difference, as_text, spreads
from loraplex.launcher.router_client import json_text

ABOUT = """\
Compare the log-probabilities of a server with those of transformers and PEFT, token by token:
of prompts, and of the server's greedy answers.

  loraplex parity ./llama ./lora --prompts prompts.jsonl --peft-dtype float32 --bound 0.05

Prompts are lines of JSON with `prompt` or `messages`. The command starts a server, by the options
of `loraplex serve`, then computes the same tokens by PEFT on the same device.
Needs pip install 'loraplex[serve,convert]'.
"""
_NAME = "adapter"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hub id or folder")
    parser.add_argument("adapter", metavar="ADAPTER", type=Path, help="folder")
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
    """Compares, and prints the table. Returns the exit code: 1 = beyond the bound.

    Raises CommandError, OptionError, ModuleNotFoundError, and what `serve` raises.
    """
    for module in ("torch", "transformers", "peft"):
        extras.require(module)
    if not (arguments.adapter / CONFIG_FILE).exists():
        raise OptionError(f"ADAPTER must be a folder with {CONFIG_FILE}")
    cases = read_cases(arguments.lines, "logprobs")
    given = [*(arguments.adapters or ()), f"{_NAME}={arguments.adapter.resolve()}"]
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        more = {"out": Path(folder), "adapters": given, "url": None, "restart": False}
        batch = argparse.Namespace(**vars(arguments) | more)
        asked = questions("logprobs", [_NAME], cases, arguments.max_tokens)
        answers = evaluation.answers(batch, api_key, environ, "answers", asked).values()
    if fault := next((answer.fault for answer in answers if answer.fault), None):
        raise CommandError(f"a prompt has no answer: {fault}")
    found = spreads(list(_differences(arguments, answers)))
    sys.stdout.write(json_text(found) if arguments.json else as_text(found))
    return int(arguments.bound is not None and found[0].max > arguments.bound)


def _differences(
    arguments: argparse.Namespace, answers: Iterable[LineAnswer]
) -> Iterator[Difference]:
    model = _peft_model(arguments)
    for answer in answers:
        served = [*answer.logprobs, *answer.output_logprobs]
        count = len(answer.prompt_ids)
        pairs = zip(served, _logprobs(model, answer), strict=True)
        for position, (ours, theirs) in enumerate(pairs, 1):
            yield Difference(position, position >= count, ours - theirs)


def _peft_model(arguments: argparse.Namespace) -> Any:
    """The base with the adapter, where a server would compute it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, arguments.peft_dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        arguments.model, revision=arguments.revision, dtype=dtype
    )
    is_on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    model = PeftModel.from_pretrained(model, str(arguments.adapter), autocast_adapter_dtype=False)
    return model.to("cuda" if is_on_gpu else "cpu", dtype).eval()


def _logprobs(model: Any, answer: LineAnswer) -> list[float]:
    """Each token's after the first, in nats."""
    import torch

    ids = torch.tensor([[*answer.prompt_ids, *answer.output_ids]], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1].float()
    rows = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    return [float(value) for value in rows[:, 0]]
