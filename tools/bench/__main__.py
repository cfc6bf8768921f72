"""`python -m tools.bench NAME …`: measurements of parts, for people who change them."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from loraplex.adapters.errors import AdapterError, CommandError
from loraplex.launcher import config
from loraplex.launcher.__main__ import fail
from loraplex.launcher.bench.commands import read_keys
from loraplex.launcher.command_line import Parser
from loraplex.launcher.options import OptionError

PROGRAM = "python -m tools.bench"
BENCHES = {
    "adapters": "registers, loads or unloads many adapters of a running server",
    "changes": "times adapters that nobody has seen, from a load to the first token",
    "cold": "times adapters from their folder to host memory",
    "lora-kernels": "times LoRA alone and over the base in a decode step",
    "make-model": "writes a model and adapters with random weights",
    "names": "measures a router that has a million registered names",
    "placement": "compares placement policies on simulated fleets",
    "router": "measures a router before a worker without an engine",
    "streams": "watches steady streams while adapters are loaded beside them",
    "vectors": "reads prompts for vectors, by turns with prefill",
}
ABOUT = "Measure a part, or make what is measured.\n\n" + "\n".join(
    f"  {name:14}{about}" for name, about in BENCHES.items()
)


def main(argv: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 failed (one sentence on stderr), 2 misused."""
    parser = Parser(prog=PROGRAM, description=ABOUT)
    parser.add_argument("name", metavar="NAME", choices=BENCHES, help="of the bench")
    parser.add_argument("words", metavar="…", nargs=argparse.REMAINDER, help="its options")
    chosen = parser.parse_args(argv)
    bench = import_module(f"tools.bench.{chosen.name.replace('-', '_')}")
    options = Parser(prog=f"{PROGRAM} {chosen.name}", description=bench.__doc__)
    bench.add_arguments(options)
    options.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = options.parse_args(chosen.words)
    try:
        read_keys(arguments, config.environment({}))
        bench.run(arguments)
    except OptionError as error:
        fail(str(error), 2)
    except (AdapterError, CommandError, OSError) as error:
        fail(str(error) or type(error).__name__, 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
