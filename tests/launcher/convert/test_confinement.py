"""What a confined process cannot do, layer by layer, whatever Python code it runs."""

import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.launcher.convert.confinement import Layer, missing

ROOT = Path(__file__).parents[3]
LAYERS: tuple[Layer, ...] = ("namespaces", "landlock", "seccomp")
# The program prints what each attempt came to. What an attempt needs is imported before.
PROGRAM = """
import ctypes, mmap, os, signal, socket, subprocess, sys, tempfile, threading, encodings.idna
from loraplex.launcher.convert import confinement

def attempt(name, call):
    try:
        print(name, "DONE", call(), flush=True)
    except BaseException as error:
        print(name, type(error).__name__, flush=True)

layers = sys.argv[1].split(",")
apply = {{
    "namespaces": confinement.enter_namespaces,
    "landlock": confinement.close_files,
    "seccomp": confinement.close_kernel,
}}
faults = {{}}
if "namespaces" in layers:
    faults["namespaces"] = apply["namespaces"]()
confinement.bound({memory}, {cpu})
for layer in layers:
    if layer != "namespaces":
        faults[layer] = apply[layer]()
for layer, fault in faults.items():
    if fault is not None:
        print(layer, "UNAVAILABLE", fault, flush=True)
        os._exit(0)
{body}
print("END", flush=True)
os._exit(0)
"""


def confined(*layers: Layer, body: str, memory: int = 64 << 20, cpu: int = 20) -> dict[str, str]:
    """Name of each attempt -> what it came to; `END` if the process lived to its end."""
    program = PROGRAM.format(body=textwrap.dedent(body), memory=memory, cpu=cpu)
    done = subprocess.run(
        [sys.executable, "-c", program, ",".join(layers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    found = {line[0]: line[1] if len(line) > 1 else "" for line in lines}
    for layer in layers:
        if found.get(layer, "").startswith("UNAVAILABLE"):
            pytest.skip(f"this machine does not grant {layer}: {found[layer]}")
    return found | {"code": str(done.returncode)}


@pytest.fixture
def port() -> Iterator[int]:
    """Of somebody who listens on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


FILES = """
attempt("read", lambda: open("/etc/passwd").read(4))
attempt("write", lambda: open({target!r}, "w"))
attempt("make", lambda: os.mkdir({target!r} + ".d"))
attempt("remove", lambda: os.remove({present!r}))
attempt("list", lambda: os.listdir("/"))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("temporary", lambda: tempfile.TemporaryFile())
"""
NETWORK = """
attempt("connect", lambda: socket.create_connection(("127.0.0.1", {port}), 2))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect("\\0somebody"))
"""
CALLS = """
attempt("socket", lambda: socket.socket())
attempt("pair", lambda: socket.socketpair())
attempt("fork", lambda: os.fork())
attempt("spawn", lambda: subprocess.run(["/bin/true"]))
attempt("thread", lambda: threading.Thread(target=print).start())
attempt("signal", lambda: os.kill(os.getppid(), 0))
attempt("pipe", lambda: os.pipe())
attempt("chmod", lambda: os.chmod({present!r}, 0o777))
attempt("stat", lambda: os.stat({present!r}))
attempt("memfd", lambda: os.memfd_create("x"))
attempt("limits", lambda: __import__("resource").setrlimit(0, (1, 1)))
libc = ctypes.CDLL(None, use_errno=True)
attempt("unshare", lambda: 1 / (libc.unshare(0x10000000) + 1))
attempt("ptrace", lambda: 1 / (libc.ptrace(16, os.getppid(), 0, 0) + 1))
attempt("x32", lambda: 1 / (libc.syscall(0x40000000 + 39) + 1))
"""


def assert_none_done(found: dict[str, str], body: str) -> None:
    attempts = body.count("attempt(")
    results = {name: text for name, text in found.items() if name not in ("END", "code")}
    assert len(results) == attempts, found
    assert not {name: text for name, text in results.items() if text.startswith("DONE")}
    assert found.get("END") == ""
    assert found["code"] == "0"


def test_seccomp_alone_leaves_nothing(tmp_path: Path, port: int) -> None:
    present = tmp_path / "present"
    present.write_text("x")
    body = (FILES + NETWORK + CALLS).format(
        target=str(tmp_path / "new"), present=str(present), port=port
    )
    assert_none_done(confined("seccomp", body=body), body)
    assert [path.name for path in tmp_path.iterdir()] == ["present"]


def test_landlock_alone_leaves_no_file_and_no_port(tmp_path: Path, port: int) -> None:
    present = tmp_path / "present"
    present.write_text("x")
    body = FILES.format(target=str(tmp_path / "new"), present=str(present))
    assert_none_done(confined("landlock", body=body), body)
    assert [path.name for path in tmp_path.iterdir()] == ["present"]


def test_namespaces_alone_leave_no_network(port: int) -> None:
    body = NETWORK.format(port=port)
    assert_none_done(confined("namespaces", body=body), body)


def test_all_together(tmp_path: Path, port: int) -> None:
    present = tmp_path / "present"
    present.write_text("x")
    body = (FILES + NETWORK + CALLS).format(
        target=str(tmp_path / "new"), present=str(present), port=port
    )
    assert_none_done(confined(*LAYERS, body=body), body)


def test_it_can_still_compute_and_write_what_is_open() -> None:
    body = """
    values = [os.urandom(1 << 20) for _ in range(8)]
    values.clear()
    attempt("sum", lambda: sum(range(100_000)))
    """
    found = confined(*LAYERS, body=body)
    assert found["sum"] == "DONE 4999950000"
    assert found["code"] == "0"


def test_memory_is_bounded() -> None:
    found = confined(*LAYERS, body='attempt("much", lambda: len(bytearray(80 << 20)))')
    assert found["much"] == "MemoryError"


def test_processor_time_is_bounded() -> None:
    found = confined(*LAYERS, body="while True: pass", cpu=1)
    assert "END" not in found
    assert found["code"] == "-24", "SIGXCPU"


def test_it_ends_with_its_parent() -> None:
    """PR_GET_PDEATHSIG says which signal the kernel sends then."""
    body = """
    import ctypes, struct
    signal_number = ctypes.c_int(0)
    confinement._libc.prctl(2, ctypes.byref(signal_number), 0, 0, 0)
    attempt("signal", lambda: signal_number.value)
    """
    assert confined("namespaces", body=body)["signal"] == "DONE 9"


def test_nothing_that_was_open_is_left(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    body = 'attempt("read", lambda: [os.read(fd, 1) for fd in range(3, 64)])'
    program = PROGRAM.format(body=body, memory=64 << 20, cpu=20)
    with secret.open() as file:
        done = subprocess.run(
            [sys.executable, "-c", program, ",".join(LAYERS)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            pass_fds=[file.fileno()],
            timeout=240,
        )
    assert "read OSError" in done.stdout or "UNAVAILABLE" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("lacking", "enough"),
    [
        ((), True),
        (("namespaces",), True),
        (("landlock",), True),
        (("seccomp",), False),
        (("namespaces", "landlock"), False),
        (("namespaces", "landlock", "seccomp"), False),
    ],
)
def test_what_is_enough(lacking: tuple[Layer, ...], enough: bool) -> None:
    why = missing(dict.fromkeys(lacking, "because"))
    assert (why is None) is enough
    assert why is None or all(f"no {layer}: because" in why for layer in lacking)
