"""Engine processes, as the machine lists them."""

import psutil

ENGINE_MODULE = "loraplex.server.engine.main"


def engines_below(pid: int) -> list[psutil.Process]:
    """Engines that the process `pid` or its children started; none where `pid` is gone.

    An engine's child bears the engine's command line until the child has its own program.
    """
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    engines = {each.pid: each for each in family if ENGINE_MODULE in _command(each)}
    return [each for each in engines.values() if _parent(each) not in engines]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None
