"""Rivals' published tests, sent to this server. Each failure that is expected has a row.

A row is `class pattern`: why tests fail whose names match; `*` is any text. Rows of class `ours`
are still to be mended, and few. A failure without a row fails, and so do more rows of `ours`.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tests.suites.bring import site, suite_of

HERE = Path(__file__).parent
PLUGINS = HERE / "plugins"
CLASSES = {
    "ours": "to be mended",
    "documented": "refused by name, as docs/reference/api.md says",
    "shape": "a shape of the rival's own that is not served",
    "assumption": "takes something for granted of the model, its tokenizer or its defaults",
    "knows": "wants a model that knows, decides to call or reasons",
    "objects": "needs the rival's own Python objects, weights or files",
    "options": "needs a launch option of the rival's",
    "media": "needs pictures or sound",
}


class Suite(NamedTuple):
    """files: to run, as globs. holding: text of those alone. without: words in their paths.
    most_ours: rows of class `ours`."""

    name: str
    files: tuple[str, ...]
    most_ours: int
    holding: str = ""
    without: str = "(?!)"  # nothing
    deselect: str = ""


_VLLM = [
    f"tests/entrypoints/{room}" for room in ("openai", "anthropic", "cohere", "pooling", "serve")
]
SUITES = (
    Suite(
        "vllm",
        tuple(f"{room}/**/test_*.py" for room in (*_VLLM, "tests/tool_use")),
        most_ours=10,
        holding="RemoteOpenAIServer|server_config",
        without="vision|vlm|mteb|lmeval|tensorizer|schema|/rpc/|uds|serving|_error|harmony|mcp_tools",
    ),
    Suite(
        "sglang",
        (str(PLUGINS / "sglang_kits.py"),),
        most_ours=3,
        deselect="MMLU or GSM8K or MGSM or MMMU or HumanEval or Accuracy or LMEval or gsm8k",
    ),
    Suite(
        "llama",
        ("unit/test_*.py",),
        most_ours=0,
        without="vision|slot|router|speculative|sleep|proxy|mcp|infill|tools_builtin|gcp|lora|ctx|kv_|stream.py",
    ),
)


class Row(NamedTuple):
    kind: str
    pattern: str

    def holds(self, name: str) -> bool:
        return bool(re.fullmatch(re.escape(self.pattern).replace(r"\*", ".*"), name))


def rows_of(suite: str) -> list[Row]:
    lines = (HERE / "rows" / f"{suite}.txt").read_text().splitlines()
    rows = [Row(*line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]
    assert {row.kind for row in rows} <= CLASSES.keys()
    return rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_each_failure_of_a_rivals_test_has_a_row(suite: Suite, tmp_path: Path) -> None:
    rows = rows_of(suite.name)
    outcomes = dict(_outcomes(suite, tmp_path / "report.xml"))
    failed = [name for name, outcome in outcomes.items() if outcome == "failed"]
    reasons = {name: next((row for row in rows if row.holds(name)), None) for name in failed}
    kinds = Counter(row.kind for row in reasons.values() if row is not None)
    print(suite.name, dict(Counter(outcomes.values())), "failed by class:", dict(kinds))
    for row in rows:
        if row not in reasons.values():
            print("no test fails by this row:", *row)
    assert not [name for name, row in reasons.items() if row is None]
    assert sum(row.kind == "ours" for row in rows) <= suite.most_ours


def _outcomes(suite: Suite, report: Path) -> Iterator[tuple[str, str]]:
    """Names of tests, each with passed, failed or skipped."""
    folder = suite_of(suite.name)
    _run(suite, folder, report)
    for case in ElementTree.parse(report).iter("testcase"):
        found = {part.tag for part in case}
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("tests.").removeprefix(
            "entrypoints."
        )
        bad = found & {"failure", "error"}
        yield name, "failed" if bad else "skipped" if "skipped" in found else "passed"


def _run(suite: Suite, folder: Path, report: Path) -> None:
    paths = sorted({path for glob in suite.files for path in _found(folder, glob)})
    chosen = [str(path) for path in paths if _is_chosen(suite, path)]
    assert chosen
    search = os.pathsep.join(map(str, (folder, PLUGINS, site())))
    options = [
        "--rootdir",
        str(folder),
        "-c",
        str(PLUGINS / "pytest.ini"),
        "-p",
        "no:cacheprovider",
    ]
    options += ["-p", f"{suite.name}_suite", "--import-mode=prepend", "--tb=line", "-q"]
    options += ["--continue-on-collection-errors", "--timeout=120", f"--junitxml={report}"]
    options += ["-k", f"not ({suite.deselect})"] if suite.deselect else []
    environ = {**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *chosen]
    log = report.with_suffix(".log")
    with log.open("wb") as out:
        subprocess.run(command, cwd=folder, env=environ, stdout=out, stderr=out, check=False)
    assert report.exists(), log.read_text()[-4000:]
    print(log)


def _found(folder: Path, glob: str) -> Iterator[Path]:
    return iter([Path(glob)]) if Path(glob).is_absolute() else folder.glob(glob)


def _is_chosen(suite: Suite, path: Path) -> bool:
    return (
        not re.search(suite.without, str(path))
        and re.search(suite.holding, path.read_text()) is not None
    )
