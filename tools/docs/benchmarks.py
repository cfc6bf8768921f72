"""The page docs/benchmarks.md, made from docs/data/*.json.

`setup.json` has the page's head and the order of the sections. Every other file is one section
with its tables. A table says how it was measured: command or script, date, GPU and runs.
"""

from pathlib import Path
from typing import Any

import msgspec

DATA = Path(__file__).parents[2] / "docs/data"

# A figure, the least and the most of several, or a text.
Cell = float | tuple[float, float] | str


class BenchmarkTable(msgspec.Struct, forbid_unknown_fields=True):
    """One measurement; `rows` are as long as `columns`, the first cell names the row."""

    date: str
    gpu: str
    runs: str
    columns: list[str]
    rows: list[list[Cell]]
    commands: list[str] = []
    script: str = ""
    title: str = ""
    decimals: int = 0
    notes: list[str] = []


class Section(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    about: list[str]
    tables: list[BenchmarkTable]
    points: list[str] = []


class Setup(msgspec.Struct, forbid_unknown_fields=True):
    """The head of the page; `sections` are file names without `.json`, in the page's order."""

    title: str
    about: list[str]
    setup: dict[str, str]
    sections: list[str]


def load(name: str, kind: type[Any], folder: Path = DATA) -> Any:
    """The file as `kind`. Raises msgspec.ValidationError with the place of what does not fit."""
    return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=kind)


def render(folder: Path = DATA) -> str:
    """The whole page."""
    setup: Setup = load("setup", Setup, folder)
    box = [f"| {name} | {text} |" for name, text in setup.setup.items()]
    head = [
        f"# {setup.title}",
        "<!-- Written by `python -m tools.docs` from docs/data/. -->",
        *setup.about,
        "\n".join(["| set-up | |", "| --- | --- |", *box]),
    ]
    sections = [load(name, Section, folder) for name in setup.sections]
    return "\n\n".join([*head, *(part for each in sections for part in _section(each))]) + "\n"


def _section(section: Section) -> list[str]:
    tables = [part for table in section.tables for part in _table(table)]
    points = "\n".join(f"- {point}" for point in section.points)
    return [f"## {section.title}", *section.about, *tables, *filter(None, [points])]


def _table(table: BenchmarkTable) -> list[str]:
    if any(len(row) != len(table.columns) for row in table.rows):
        raise ValueError(f"a row of {table.columns} has another number of cells")
    title = [f"### {table.title}"] if table.title else []
    commands = "\n".join(f"    {command}" for command in table.commands)
    how = f"Measured {table.date}. GPU: {table.gpu}. Runs: {table.runs}."
    if table.script:
        how += f" By a script {table.script}."
    lines = [table.columns, ["---"] + ["--:"] * (len(table.columns) - 1)]
    lines += [[_cell(cell, table.decimals) for cell in row] for row in table.rows]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"- {note}" for note in table.notes)
    return [*title, *filter(None, [commands]), how, grid, *filter(None, [notes])]


def _cell(cell: Cell, decimals: int) -> str:
    if isinstance(cell, str):
        return cell
    if isinstance(cell, tuple):
        return " to ".join(f"{value:.{decimals}f}" for value in cell)
    return f"{cell:.{decimals}f}"
