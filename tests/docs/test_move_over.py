"""`docs/guides/move-over.md` has the options of other servers as the code has them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.launcher.command_line import flags_of
from loraplex.launcher.config import serve_options
from loraplex.launcher.moved_line import FLAGS, ROWS, OtherOption

PAGE = Path(__file__).parents[2] / "docs/guides/move-over.md"
TITLES = {"taken": "Taken", "void": "Without effect", "refused": "Refused"}
KEPT = (
    *("--host", "--port", "--revision", "--device", "--max-lora-rank", "--max-logprobs"),
    "--gpu-memory-utilization",
)


def line(row: OtherOption) -> str:
    flags = ", ".join(f"`{flag.replace('*', '…')}`" for flag in row.arities)
    harmless = " or ".join(f"`{value}`" for value in row.harmless)
    alone = f"; taken as {harmless}" if harmless else ""
    ours = ": ".join(filter(None, (f"`{row.to}`" if row.to else "", row.why)))
    return f"| {flags} | {ours}{alone} |"


def table(title: str) -> list[str]:
    _, found, rest = PAGE.read_text().partition(f"\n### {title}\n")
    assert found, title
    lines = rest.partition("\n#")[0].splitlines()
    return [line for line in lines if line.startswith("| `")]


@pytest.mark.parametrize(("kind", "title"), TITLES.items())
def test_the_tables_are_the_codes(kind: str, title: str) -> None:
    assert table(title) == [line(row) for row in ROWS if row.kind == kind]


def own() -> Mapping[str, bool]:
    return flags_of(serve_options())


def test_what_an_option_becomes_is_an_option() -> None:
    taken = {row.to.partition("=")[0] for row in ROWS if row.kind == "taken"}
    assert taken - own().keys() == {"MODEL", "HF_HUB_CACHE"}
    assert sum(len(row.arities) for row in ROWS) == len(FLAGS), "a flag is in two rows"
    assert FLAGS.keys() & own().keys() == {"--dtype"}


@pytest.mark.parametrize("flag", KEPT)
def test_options_of_the_same_name_are_listed(flag: str) -> None:
    assert flag in own()
    assert f"`{flag}`" in PAGE.read_text().partition("### Taken")[0]
