"""Settings that must stand before any test module is imported."""

import atexit
import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import certifi
import hypothesis.internal.conjecture.providers as choices
import pytest
from hypothesis import HealthCheck, settings

from tests import common_server
from tests.left_out import LeftOut
from tests.longest_first import LongestFirst
from tests.unchanged import note

# Without bytecode each process compiles the tests and the product anew: a tenth of a run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Triton reads this when it is first imported: without a GPU its kernels run under the interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads of one process take the cores of the others, and what waits for them spins.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# bitsandbytes compiles functions when PEFT imports it, and brings the whole compiler of torch in.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# A client of TLS reads every authority: 100 and more take longer than most tests. This one vouches
# for nobody. No test asks a server that any authority vouches for.
AUTHORITY = str(Path(__file__).parent / "authority.pem")
os.environ["SSL_CERT_FILE"] = AUTHORITY
certifi.where = lambda: AUTHORITY

# How long an example takes says how busy the machine is. An ordinary run draws the same everywhere.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _PATIENT, derandomize=True)
settings.register_profile("anew", _PATIENT)
settings.load_profile("same")

# Else each process parses the product and all tests for numbers and texts to draw from, and what is
# drawn hangs on the files that were collected.
setattr(choices, "_get_local_constants", lambda: choices._local_constants)  # noqa: B010


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(common_server)
    config.pluginmanager.register(LeftOut())
    config.pluginmanager.register(LongestFirst(config))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


# PEFT writes a page about each adapter that it saves: a quarter of the time of tests with PEFT.
def pytest_collection_finish() -> None:
    if "peft" in sys.modules:
        sys.modules["peft"].PeftModel.create_or_update_model_card = lambda *_: None


# Modules and 20,000 tests last. Without this each collection of garbage would look at all of them.
# The interpreter of kernels makes small things by the million, and few of them are in circles.
_UNCOLLECTED = 20_000


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, None, None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(_UNCOLLECTED)
        gc.enable()
        atexit.register(gc.unfreeze)  # else bindings report what is left as leaks
