"""The README's curl lines give the answers printed beneath them; `…` stands for what varies."""

import re
import shlex
import subprocess

import pytest

from tests.e2e.serving import ROOT, Serving

BLOCK = re.compile(r"```sh\n(curl .*?)```\n\n```(?:json|text)\n(.*?)```", re.S)
PAIRS: list[tuple[str, str]] = BLOCK.findall((ROOT / "README.md").read_text())


def test_there_are_three() -> None:
    assert len(PAIRS) >= 3


@pytest.mark.parametrize(("command", "printed"), PAIRS)
def test_curl_line(serving: Serving, command: str, printed: str) -> None:
    words = shlex.split(command.replace("\\\n", " ").replace("http://localhost:8080", serving.url))
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    pattern = ".*?".join(re.escape(part) for part in printed.strip().split("…"))
    assert re.fullmatch(pattern, done.stdout.strip(), re.S), done.stdout
