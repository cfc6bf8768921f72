"""What the images are made of. No engine builds them here: their install step is run as it is."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.chart import CHART, ROOT
from tests.deploy.local_pods import START_TIMEOUT_S
from tests.ports import free_port
from tests.tethered import tethered

IMAGES = ROOT / "deploy/images"
FILES = sorted(IMAGES.glob("*.Dockerfile"))
INSTALL_TIMEOUT_S = 800  # packages come over a network


@pytest.fixture(scope="module")
def router_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The router's virtual environment, made by the commands of its Dockerfile."""
    folder = tmp_path_factory.mktemp("image") / "loraplex"
    for script, what, extras in steps("router"):
        subprocess.run(
            ["sh", str(ROOT / script), what, extras, str(folder)],
            cwd=folder.parent,
            check=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    return folder


def steps(name: str) -> list[tuple[str, str, str]]:
    """Script, what it installs and with which extras."""
    return re.findall(r"RUN .*sh /src/(\S+) (\S+) (\S+) /opt/loraplex", dockerfile(name))


@pytest.mark.parametrize("name", ["router", "worker"])
def test_dependencies_are_a_layer_before_the_sources(name: str) -> None:
    """An edit of a line fetches nothing again."""
    first, second = steps(name)
    assert (first[1], second[1]) == ("dependencies", "project")
    assert (first[0], first[2]) == (second[0], second[2])
    before, _ = dockerfile(name).split(" dependencies ")
    copied = " ".join(re.findall(r"^COPY (.+) \S+$", before, re.M)).split()
    assert set(copied) == {
        *("pyproject.toml", "constraints.txt"),
        *("deploy/images/install.sh", "deploy/images/constraints.gpu.txt"),
    }


def dockerfile(name: str) -> str:
    return (IMAGES / f"{name}.Dockerfile").read_text()


@pytest.mark.exhaustive
def test_the_routers_image_has_no_torch(router_image: Path) -> None:
    listed = subprocess.run(
        [str(router_image / "bin/python"), "-m", "pip", "list", "--format=freeze"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    installed = dict(line.split("==") for line in listed.splitlines() if "==" in line)
    assert not installed.keys() & {"torch", "triton", "transformers", "peft", "boto3"}
    assert not [name for name in installed if name.startswith(("nvidia", "cuda"))]
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    differing = {
        name: version
        for name, version in installed.items()
        if name not in ("loraplex", "pip", "setuptools") and pinned.get(name) != version
    }
    assert not differing, "pin them in constraints.txt"


@pytest.fixture
def router(router_image: Path, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """(port, log) of a router run by the image's own command, far from the checkout."""
    port, log = free_port(), tmp_path / "log"
    home = tmp_path / "home"
    home.mkdir()
    arguments = ["router", f"--port={port}", "--worker=ws://127.0.0.1:9", f"--cache-dir={home}"]
    environ = {"PATH": f"{router_image}/bin:/usr/bin:/bin", "HOME": str(home)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            tethered("loraplex", *arguments),
            cwd=home,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield port, log
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


@pytest.mark.exhaustive
def test_the_routers_image_runs(router: tuple[int, Path]) -> None:
    port, log = router
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            live = httpx.get(f"http://127.0.0.1:{port}/health/live", trust_env=False)
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)  # polls a condition, bounded by the deadline
    assert live.status_code == 200
    ready = httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False)
    assert ready.json()["error"] == "no worker is ready"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_are_reproducible_and_without_root(path: Path) -> None:
    text = path.read_text()
    uid = re.search(r"runAsUser: (\d+)", (CHART / "values.yaml").read_text())
    assert uid is not None
    assert f"USER {uid[1]}:{uid[1]}" in text
    bases = re.findall(r"^FROM (\S+)", text, re.M)
    assert set(bases) == {bases[0]}
    assert bases[0].startswith("${"), "a base is an argument, so that it may be a digest"
    assert re.search(r"^ARG \w+_IMAGE=\S+:(?!latest)[\w.-]+$", text, re.M)
    assert 'ENTRYPOINT ["loraplex"]' in text
    assert "constraints.txt" in text
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
        for word in line.split()
    }
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().split()
    assert copied <= {word.removeprefix("!") for word in ignored}
    assert all((ROOT / word).exists() for word in copied)


def test_the_install_step_is_pinned() -> None:
    step = (IMAGES / "install.sh").read_text()
    files = re.findall(r'-c "\$source/(\S+)"', step)
    assert len(files) == 2
    for name in files:
        pins = [line for line in (ROOT / name).read_text().splitlines() if line[0] != "#"]
        assert all(re.fullmatch(r"[\w.-]+==[\w.!+-]+", pin) for pin in pins)
