"""`loraplex adapter convert`: its options and output."""

import argparse
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.peft.config import MAX_RANK
from loraplex.adapters.peft.validate import MAX_LORA_RANK, AdapterLimits
from loraplex.launcher.convert.formats import MlxOptions
from loraplex.launcher.convert.methods import EXACT, MethodOptions
from loraplex.launcher.convert.plan import Conversion
from loraplex.launcher.options import OptionError, path_of

if TYPE_CHECKING:
    from loraplex.adapters.judge import Judged
    from loraplex.launcher.command_line import Parser

ABOUT = """\
Make an adapter that can be served of FOLDER: of mlx-lm's format, of PEFT's weights in a pickle
(adapter_model.bin, .pt, .pth), which serving never opens, or of another method of PEFT than LoRA.

  loraplex adapter convert ./mlx-lora --out ./lora --base ./llama
  loraplex adapter convert ./lora-of-2023 --out ./lora
  loraplex adapter convert ./loha --out ./lora --base ./llama --rank 64 --max-error 0.01

The result is compared with its source value by value, and judged as serving judges it. Without
--base, what depends on the base is not checked. Another method needs --base: PEFT merges the
adapter into that model in memory, and the LoRA is equal to the change, or refused beyond
--max-error. A pickle is read by a process of its own, which calls nothing that the pickle names.
Both need pip install 'loraplex[convert]'.
"""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: "Parser") -> None:
    parser.add_argument("--out", metavar="OUT", required=True, help="a new or an empty folder")
    parser.add_argument("--weights", metavar="FILE", help="the file to take, if FOLDER has several")
    parser.add_argument(
        "--scale", metavar="NUMBER", help="of mlx-lm's format: what B A x is multiplied with"
    )
    parser.add_argument("--base-name", metavar="NAME", help="of mlx-lm's format: the base's name")
    parser.add_argument(
        "--rank",
        metavar="N",
        default="auto",
        help="of other methods than LoRA: the rank; auto: of each module the lowest that "
        f"--max-error allows, up to {MAX_LORA_RANK} [default: auto]",
    )
    parser.add_argument(
        "--max-error",
        metavar="E",
        default=str(EXACT),
        help="of other methods than LoRA: what a module's change may lose, relative, in the "
        "Frobenius norm [default: %(default)s]",
    )
    parser.add_argument(
        "--initial",
        metavar="FOLDER",
        help="of PiSSA, CorDA and their like: the adapter as it was before the training",
    )


def check_new_folder(text: str) -> Path:
    """The folder of the result. Raises OptionError before anything is read for it."""
    out = path_of(text, "--out").resolve()
    if out.exists() and not out.is_dir():
        raise OptionError(f"--out {text}: it is a file; name a new folder")
    if out.is_dir() and any(out.iterdir()):
        raise OptionError(f"--out {text}: the folder is not empty")
    if not out.parent.is_dir():
        raise OptionError(f"--out {text}: there is no folder {out.parent}")
    return out


def convert(
    arguments: argparse.Namespace,
    base: BaseSpec | None,
    limits: AdapterLimits,
    base_folder: Path | None,
    ties_head: bool | None,
) -> tuple["Judged", Conversion]:
    """Carry out the command. base_folder: the base's weights. ties_head: as in `MlxOptions`. Raises
    AdapterError, OSError, OptionError."""
    from loraplex.launcher.convert.convert import ConversionOptions, convert_folder

    mlx = MlxOptions(_scale(arguments.scale), arguments.base_name, ties_head)
    method = _method(arguments, base_folder)
    options = ConversionOptions(arguments.weights, mlx, method)
    with _interruptible():
        out = check_new_folder(arguments.out)
        return convert_folder(path_of(arguments.ref, "FOLDER"), out, base, limits, options)


def _method(arguments: argparse.Namespace, base_folder: Path | None) -> MethodOptions:
    rank, max_error = arguments.rank, _number(arguments.max_error)
    is_number = rank.isdecimal() and len(rank) <= len(str(MAX_RANK))
    if rank != "auto" and not (is_number and 0 < int(rank) <= MAX_RANK):
        raise OptionError(f"--rank must be auto or a number up to {MAX_RANK}, got {rank[:40]!r}")
    if not 0 <= max_error < 1:
        given = arguments.max_error[:40]
        raise OptionError(f"--max-error must be a number from 0 to less than 1, got {given!r}")
    initial = None if arguments.initial is None else path_of(arguments.initial, "--initial")
    chosen = None if rank == "auto" else int(rank)
    return MethodOptions(chosen, max_error, base_folder, initial)


def _scale(text: str | None) -> float | None:
    if text is None:
        return None
    number = _number(text)
    if not math.isfinite(number) or number == 0:
        raise OptionError(f"--scale must be a number and not 0, got {text[:40]!r}")
    return number


def _number(text: str) -> float:
    """The number, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@contextmanager
def _interruptible() -> Iterator[None]:
    """End the command on a signal as Ctrl-C does, so that nothing is left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
