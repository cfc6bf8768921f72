"""Prompts and the answers that a good model would give to them, from files.

Each kind of task has texts of its own: two versions of sources, JSON that packages hold, SQL,
prose, and the demo adapters' messages.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loraplex.launcher.bench.errors import BenchError
from tools.demo.corpus import held_out_messages
from tools.demo.tasks import ANSWERS

_LEAST, _MOST = 400, 24_000  # characters of a file: up to about 8,000 tokens
_LEAST_PART, _MOST_PART = 200, 4_000  # of an answer that is a part of its prompt
_LONG_TEXT = 2_000  # of prose, half of it a prompt


class TaskText(NamedTuple):
    """kind: of task. adapter: whose answers may help each other."""

    kind: str
    adapter: str
    prompt: str
    answer: str


def edits(old: Path, new: Path) -> Iterator[TaskText]:
    """Python files that differ between two folders: the old version, then the new one."""
    for path in _files(new, ".py"):
        before = old / path.relative_to(new)
        text, changed = _read(before) if before.exists() else "", _read(path)
        if text and changed and text != changed:
            prompt = f"Bring this file up to date.\n\n{text}\n\nThe whole new file:\n\n"
            yield TaskText("edits", "edits", prompt, changed)


def extraction(folder: Path) -> Iterator[TaskText]:
    """JSON files: the answer is one member of an object anywhere in the prompt."""
    for path in _files(folder, ".json"):
        if not (text := _read(path)):
            continue
        try:
            document = json.loads(text)
        except ValueError:
            continue
        parts = [
            (name, dumped)
            for name, value in _members(document)
            if _LEAST_PART <= len(dumped := json.dumps(value, indent=2)) <= _MOST_PART
        ]
        whole = json.dumps(document, indent=2)
        if parts and len(whole) <= _MOST:
            name, answer = parts[len(parts) // 2]
            prompt = f'{whole}\n\nGive the value of "{name}" as JSON.\n\n'
            yield TaskText("extraction", "extraction", prompt, answer)


def sql(folder: Path) -> Iterator[TaskText]:
    """SQL files: each statement is the answer to the one before it."""
    for path in _files(folder, ".sql"):
        statements = [part.strip() for part in path.read_text("utf-8", "replace").split(";")]
        for before, answer in itertools.pairwise(statements):
            if min(len(before), len(answer)) >= _LEAST_PART:
                prompt = f"{before};\n\nThe next statement:\n\n"
                yield TaskText("SQL", "SQL", prompt, f"{answer};")


def prose(folder: Path) -> Iterator[TaskText]:
    """Descriptions of packages: the second half follows the first."""
    for path in _files(folder, "METADATA", ".md", ".rst"):
        text = path.read_text("utf-8", "replace").partition("\n\n")[2]
        words = re.sub(r"```.*?```", "", text, flags=re.S)[:_LONG_TEXT]
        if len(words) == _LONG_TEXT:
            half = _LONG_TEXT // 2
            yield TaskText("prose", "prose", words[:half], words[half:])


def demo(count: int) -> Iterator[TaskText]:
    """Messages that the demo adapters have not seen, and the right answers."""
    for adapter, answer in ANSWERS.items():
        for message in held_out_messages(0, count):
            yield TaskText(f"demo {adapter}", adapter, message.text + "\n", answer(message.facts))


def sampled(tasks: Iterator[TaskText], count: int, where: str) -> list[TaskText]:
    """So many tasks, from everywhere in what there is. where: it was looked for."""
    found = list(tasks)
    if not found:
        raise BenchError(f"{where}: no texts of a fitting length: name another folder")
    step = max(1, len(found) // count)
    return found[::step][:count]


def _files(folder: Path, *endings: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.name.endswith(endings))


def _read(path: Path) -> str:
    """Empty if its length does not fit."""
    if not _LEAST <= path.stat().st_size <= _MOST:
        return ""
    return path.read_text("utf-8", "replace")


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from value.items()
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from _members(part)
