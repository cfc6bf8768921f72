"""The docs say what the code does: modules, routes, fields, errors, keys and options."""

import json
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

from loraplex.adapters.peft.config import HARMLESS, REFUSED, USED
from loraplex.router.api.errors import Dialect, error_answer, status_of
from loraplex.router.api.lorax.request import SAID_HERE, LoraxParameters
from loraplex.router.api.openai.chat import ChatBody
from loraplex.router.api.openai.common import HARMLESS as HARMLESS_FIELDS
from loraplex.router.api.openai.common import OpenAIBody
from loraplex.router.api.openai.completions import CompletionsBody
from loraplex.router.api.openapi import openapi_document
from loraplex.router.api.request.known_elsewhere import ALIASES, ELSEWHERE, Elsewhere
from loraplex.router.api.sglang.generate import SglangBody, SglangSampling
from loraplex.router.call import Cause, RequestError
from tests.documented_codes import VIOLATION_CODES
from tools.docs import benchmarks, families
from tools.docs.pages import PAGES as MADE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
PACKAGES = ("adapters", "server", "router", "launcher")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")


def page(name: str) -> str:
    """Text of the one page with this file name, in whichever folder of docs/."""
    (path,) = DOCS.rglob(name)
    return path.read_text()


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next of any level."""
    _, found, rest = text.partition(f"# {title}\n")
    assert found, f"no heading {title!r}"
    return rest.partition("\n#")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of a section's tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {i for i, row in enumerate(cells) if all(cell.startswith("---") for cell in row)}
    return [row for i, row in enumerate(cells) if not {i, i + 1} & rules]


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    for link in _LINK.findall(path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_links_every_page() -> None:
    index = DOCS / "README.md"
    linked = {
        (DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(index.read_text())
    }
    assert sorted(set(DOCS.rglob("*.md")) - linked - {index}) == []


# architecture.md


def listed_rooms() -> dict[str, bool]:
    """Folder of each room in the table -> whether it is marked pure."""
    table = rows(section(page("architecture.md"), "Rooms"))
    return {cells[0].strip("`/"): cells[1] == "pure" for cells in table}


def test_the_table_has_every_room_and_no_other() -> None:
    there = {
        str(path.parent.relative_to(ROOT))
        for package in (*PACKAGES, "deploy", "tools")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and path.parent != ROOT / "server"
    }
    assert set(listed_rooms()) == there


def test_pure_rooms_are_the_linters_contract() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contract = next(c for c in config["contracts"] if c["name"] == "policy is pure")
    modules = [module.removeprefix("loraplex.") for module in contract["source_modules"]]
    pure = [module.replace(".", "/") for module in modules]
    for room, is_pure in listed_rooms().items():
        assert is_pure == any(room == name or room.startswith(f"{name}/") for name in pure), room


def test_tests_named_by_invariants_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page("architecture.md"))
    assert len(named) > 10
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M), name


# api.md


def test_routes_are_those_of_the_openapi_document() -> None:
    described = {
        (method.upper(), path)
        for path, methods in openapi_document("0")["paths"].items()
        for method in methods
    }
    table = page("api.md").partition("## Bodies")[0]
    listed = {
        (route.split()[0], route.split()[1])
        for row in rows(table)
        for route in _CODE.findall(row[0])
    }
    assert listed == described


@pytest.mark.parametrize(
    ("title", "head", "fields"),
    [
        ("LoRAX", "parameter", LoraxParameters.__struct_fields__),
        ("SGLang", "field of SGLang's body", SglangBody.__struct_fields__),
        ("SGLang", "sampling parameter", SglangSampling.__struct_fields__),
        ("OpenAI", "field of both", OpenAIBody.__struct_fields__),
        ("OpenAI", "field of completions", CompletionsBody.__struct_fields__),
        ("OpenAI", "field of chat", ChatBody.__struct_fields__),
    ],
)
def test_parameters_are_those_of_the_bodies(title: str, head: str, fields: tuple[str, ...]) -> None:
    shared = set(OpenAIBody.__struct_fields__) if head.startswith("field of c") else set()
    table = section(page("api.md"), title).partition(f"| {head} |")[2].partition("\n\n")[0]
    listed = [name for row in rows(table) for name in _CODE.findall(row[0])]
    assert sorted(listed) == sorted(set(fields) - shared)


def test_fields_of_other_servers_are_the_codes() -> None:
    listed: dict[str, Elsewhere] = {}
    for names, neutral, hint in rows(section(page("api.md"), "Refused")):
        values = tuple(json.loads(value) for value in _CODE.findall(neutral))
        also = () if neutral.startswith("only ") else Elsewhere().neutral
        for name in _CODE.findall(names):
            assert name not in listed, name
            listed[name] = Elsewhere((*also, *values), hint)
    assert listed == ELSEWHERE


def test_other_names_of_fields_are_the_codes() -> None:
    table = section(page("api.md"), "OpenAI").partition("| other names |")[2].partition("\n\n")[0]
    listed = {
        name: own for row in rows(table) for name in _CODE.findall(row[0]) for own in [row[1][1:-1]]
    }
    assert listed == ALIASES


@pytest.mark.parametrize("name", sorted(HARMLESS_FIELDS))
def test_harmless_fields_are_listed(name: str) -> None:
    assert f"`{name}`" in section(page("api.md"), "OpenAI").partition("| field of both |")[0]


@pytest.mark.parametrize(("name", "known"), SAID_HERE.items())
def test_names_that_lorax_routes_know_by_another_are_listed(name: str, known: str) -> None:
    told = re.sub(r"\s+", " ", section(page("api.md"), "Refused"))
    assert re.search(rf"`{known}` for [^;.]*`{name}`", told), f"`{known}` for `{name}`"


def test_every_error_is_in_the_table() -> None:
    """Status, error_type, type and code of each cause, as the code answers it."""
    listed = {tuple(cell.strip("`") for cell in row[:5]) for row in error_rows()}
    assert listed == {error_row(cause) for cause in causes()}


def error_rows() -> list[list[str]]:
    return rows(section(page("api.md"), "Errors"))


def causes() -> tuple[Cause, ...]:
    return typing.get_args(Cause)


def error_row(cause: Cause) -> tuple[str, ...]:
    def body(dialect: Dialect) -> typing.Any:
        return json.loads(error_answer(RequestError(cause, "why"), dialect).body)

    lorax, openai = body("lorax"), body("openai")["error"]
    return (
        str(status_of(cause, "lorax")),
        lorax["error_type"],
        str(status_of(cause, "openai")),
        openai["type"],
        openai["code"] or "",
    )


# adapters.md and configuration.md


@pytest.mark.parametrize(("title", "keys"), [("Used", USED), ("Harmless", HARMLESS)])
def test_peft_keys_are_the_codes(title: str, keys: frozenset[str]) -> None:
    listed = [row[0].strip("`") for row in rows(section(page("adapters.md"), title))]
    assert listed == sorted(keys)


def test_refused_peft_keys_are_the_codes() -> None:
    listed = {row[0].strip("`"): row[1] for row in rows(section(page("adapters.md"), "Refused"))}
    assert listed == {
        key: ", ".join(json.dumps(value) for value in values) for key, values in REFUSED.items()
    }


def test_violations() -> None:
    """Each code that the adapters' room spells is listed, and none that it does not."""
    source = "".join(path.read_text() for path in ROOT.glob("adapters/**/*.py"))
    raised = set(re.findall(r'(?:\badd|\binvalid|Violation)\(\s*"([a-z_]+)"', source))
    assert len(raised) > 40
    assert raised <= VIOLATION_CODES
    assert {code for code in VIOLATION_CODES if f'"{code}"' not in source} == set()


def test_the_check_shown_is_what_it_prints() -> None:
    folder = "launcher/demo/adapters/polite"
    done = subprocess.run(
        [sys.executable, "-m", "loraplex", "adapter", "check", folder, "--base", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout in page("adapters.md")


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_made_pages_are_fresh(path: Path) -> None:
    assert path.read_text() == MADE[path](), "run: .venv/bin/python -m tools.docs"


def test_the_readme_lists_the_families() -> None:
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    listed = families.listed()
    assert f" {listed}, from Hub-format folders" in readme, f"put into README.md: {listed}"


def test_every_measurement_is_on_the_page() -> None:
    setup = benchmarks.load("setup", benchmarks.Setup)
    files = {path.stem for path in benchmarks.DATA.glob("*.json")}
    assert {*setup.sections, "setup"} == files
