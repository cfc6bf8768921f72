"""One process of a load: a `LoadPart` on stdin, its outcomes on stdout, both as msgpack."""

import asyncio
import sys

import msgspec
import uvloop

from loraplex.launcher.bench.load.serve import LoadPart, run_job


def main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LoadPart)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(run_job(job))
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main()
