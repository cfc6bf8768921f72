"""`python -m loraplex.adapters.merge.process FOLDER`: one merge in a process of low priority.

It bounds its own memory and takes the lower priority before anything large is imported.
"""

import os
import resource
import sys
from importlib import import_module
from pathlib import Path

MAX_MEMORY = 6 << 30
MAX_CPUS = 8
_NICENESS = 15


def confine() -> None:
    """Limits this process: half of the CPUs, `MAX_CPUS` at most, low priority, `MAX_MEMORY`, no
    core dumps. BLAS makes a thread for each of these CPUs.
    """
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[-min(MAX_CPUS, max(1, len(cpus) // 2)) :])
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    confine()
    import_module("loraplex.adapters.merge.job").run_job(Path(sys.argv[1]))
