"""Options come from the config dataclasses; a bad value stops with its name."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.launcher import config
from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.options import (
    RETIRED,
    OptionError,
    Values,
    build,
    options_of,
    parse,
    unknown_variables,
)
from loraplex.launcher.worker_groups import AskedGroups
from loraplex.router.config import RouterConfig
from loraplex.server.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    size: int = field(default=1 << 20, metadata={"unit": "bytes", "help": "how large"})
    count: int = field(default=3, metadata={"min": 1, "max": 9})
    wait_s: float = 1.5
    loud: bool = False
    place: Path = Path("/tmp")
    roots: tuple[Path, ...] = ()
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    port: int = 8080
    password: str = field(default="", metadata={"secret": True})


OPTIONS = {option.field: option for option in options_of(Sample)}


def read(*argv: str, **environ: str) -> Sample:
    parser = Parser()
    parser.add_argument("name", nargs="?")
    add_options(parser, OPTIONS.values())
    values = config.resolve(OPTIONS.values(), parser.parse_args(argv), environ)
    sample: Sample = build(Sample, values)
    return sample


GOOD: list[tuple[str, str, object]] = [
    ("size", "512MiB", 512 << 20),
    ("size", "2GB", 2 * 10**9),
    ("size", "1.5 GiB", 3 << 29),
    ("size", "4096", 4096),
    ("size", "10k", 10 << 10),
    ("count", "9", 9),
    ("wait_s", "0.25", 0.25),
    ("loud", "Yes", True),
    ("loud", "0", False),
    ("place", "/a/b", Path("/a/b")),
    ("mode", "slow", "slow"),
    ("limit", "17", 17),
    ("limit", "none", None),
    ("port", "0", 0),
]
BAD: list[tuple[str, str, str]] = [
    ("size", "many", "512MiB"),
    ("size", "-1", "512MiB"),
    ("size", "1XB", "512MiB"),
    ("size", "", "512MiB"),
    ("count", "0", "at least 1"),
    ("count", "10", "at most 9"),
    ("count", "2.5", "whole number"),
    ("count", "", "whole number"),
    ("wait_s", "nan", "finite"),
    ("wait_s", "inf", "finite"),
    ("wait_s", "soon", "a number"),
    ("wait_s", "-1", "at least 0"),
    ("loud", "maybe", "true or false"),
    ("place", "", "empty"),
    ("place", "a\0b", "empty"),
    ("mode", "Fast", "fast, slow"),
    ("port", "65536", "at most 65535"),
    ("port", "-1", "at least 0"),
    *(("port", "9" * length, "") for length in (30, 400, 5000)),
    *(("size", f"{'9' * length}GiB", "") for length in (30, 400, 5000)),
    ("wait_s", "9" * 400, "finite"),
    ("wait_s", "1e300", "at most 1e+09"),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_good_values(name: str, text: str, value: object) -> None:
    assert parse(OPTIONS[name], [text], "x") == value
    sample = read("m", **{OPTIONS[name].variable: text})
    assert getattr(sample, name) == value


@pytest.mark.parametrize(("name", "text", "says"), BAD)
def test_bad_values_stop_with_the_name(name: str, text: str, says: str) -> None:
    variable = OPTIONS[name].variable
    with pytest.raises(OptionError, match=variable) as caught:
        read("m", **{variable: text})
    assert says in str(caught.value)
    if OPTIONS[name].kind != "bool":
        with pytest.raises(OptionError, match=f"--{OPTIONS[name].flag} "):
            read("m", f"--{OPTIONS[name].flag}={text}")


def test_a_flag_wins_over_its_variable() -> None:
    assert read("m", "--count", "4", LORAPLEX_COUNT="5").count == 4
    assert read("m", "--no-loud", LORAPLEX_LOUD="1").loud is False
    assert read("m", LORAPLEX_NAME="other").name == "m"
    assert read(LORAPLEX_NAME="other").name == "other"


def test_lists_repeat_or_have_commas() -> None:
    roots = (Path("/a"), Path("/b"))
    assert read("m", "--root", "/a", "--root", "/b").roots == roots
    assert read("m", LORAPLEX_ROOT="/a, /b").roots == roots


def test_a_required_value_is_asked_for() -> None:
    with pytest.raises(OptionError, match="LORAPLEX_NAME"):
        read()


def test_flags_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read("m", "--coun", "3")
    assert caught.value.code == 2
    assert "--coun" in capsys.readouterr().err


def test_secrets_come_from_variable_or_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    file.write_text(" hush \n")
    assert read("m", LORAPLEX_PASSWORD="x").password == "x"
    assert read("m", "--password-file", str(file)).password == "hush"
    assert read("m", LORAPLEX_PASSWORD_FILE=str(file)).password == "hush"
    with pytest.raises(SystemExit):
        read("m", "--password", "x")
    capsys.readouterr()
    with pytest.raises(OptionError, match="cannot be read"):
        read("m", "--password-file", str(tmp_path / "absent"))
    file.write_text("\n")
    with pytest.raises(OptionError, match="is empty"):
        read("m", "--password-file", str(file))


@pytest.mark.parametrize("secret", ["two\nlines", "bell\a", "x" * 5000])
def test_a_secret_that_could_never_be_sent(tmp_path: Path, secret: str) -> None:
    """It is one line, and messages name its origin, never its value."""
    file = tmp_path / "secret"
    file.write_text(secret)
    for arguments, variables, source in (
        (["--password-file", str(file)], {}, "--password-file"),
        ([], {"LORAPLEX_PASSWORD_FILE": str(file)}, "LORAPLEX_PASSWORD_FILE"),
        ([], {"LORAPLEX_PASSWORD": secret}, "LORAPLEX_PASSWORD"),
    ):
        with pytest.raises(OptionError, match=source) as refused:
            read("m", *arguments, **variables)
        assert secret[:3] not in str(refused.value)
    assert read("m", LORAPLEX_PASSWORD="hush\n").password == "hush"


def test_a_secret_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="--password-file .*: it is no text"):
        read("m", "--password-file", str(file))


def test_unknown_variables_get_a_hint() -> None:
    known = {option.variable for option in OPTIONS.values()}
    assert unknown_variables(["PATH", "LORAPLEX_COUNT"], known) == []
    (typo,) = unknown_variables(["LORAPLEX_CUONT"], known)
    assert "LORAPLEX_CUONT" in typo
    assert "did you mean LORAPLEX_COUNT?" in typo
    (strange,) = unknown_variables(["LORAPLEX_ZZZZZZZZ"], known)
    assert "did you mean" not in strange
    with pytest.raises(OptionError, match=r"did you mean LORAPLEX_PORT\?"):
        config.check_variables({"LORAPLEX_PROT": "1"})
    with pytest.raises(OptionError, match="did you mean LORAPLEX_KV_MEMORY"):
        config.check_variables({"LORAPLEX_KV_MEMROY": "1GB"})
    config.check_variables({"LORAPLEX_KV_MEMORY": "1GB", "LORAPLEX_SECRET_FILE": "/x"})


samples = st.builds(
    Sample,
    name=st.just("m"),
    size=st.integers(0, 1 << 50),
    count=st.integers(1, 9),
    wait_s=st.floats(0, 1e9),
    loud=st.booleans(),
    place=st.sampled_from([Path("/a"), Path("b c")]),
    roots=st.lists(st.sampled_from([Path("/a"), Path("/b,c")])).map(tuple),
    mode=st.sampled_from(["fast", "slow"]),
    limit=st.none() | st.integers(0, 1 << 40),
    port=st.integers(0, 65535),
)


@given(samples)
def test_a_child_reads_its_config_as_it_is(sample: Sample) -> None:
    assert config.config_of(Sample, config.document_of(sample)) == sample


@pytest.mark.parametrize("kind", [WorkerConfig, RouterConfig])
def test_every_option_has_help_and_a_flag_of_its_own(kind: type[Any]) -> None:
    options = options_of(kind)
    assert all(option.help for option in options)
    assert len({option.flag for option in options}) == len(options)


def test_a_childs_options_are_in_its_document_alone() -> None:
    document = config.document_of(Sample("m", password="hush"))
    assert config.config_of(Sample, document).password == "hush"
    environ = config.child_environment({"PATH": "/bin", "LORAPLEX_COUNT": "4"})
    assert environ == {"PATH": "/bin", "PYTHONUNBUFFERED": "1"}


def test_serve_takes_both_halves_options_once() -> None:
    options = {option.field: option for option in config.serve_options()}
    assert {"model", "kv_memory", "adapters", "max_queue", "port"} <= options.keys()
    assert not {"workers", "secret", "worker_id"} & options.keys()
    assert options["port"].default == 8080


@pytest.mark.parametrize(
    ("flags", "variables", "asked"),
    [
        ((), {}, AskedGroups()),
        (("--workers", "auto", "--tp", "AUTO"), {}, AskedGroups()),
        (("--workers", "3"), {"LORAPLEX_TP": "2"}, AskedGroups(3, 2)),
        (("--tp", "1"), {"LORAPLEX_WORKERS": "auto"}, AskedGroups(None, 1)),
    ],
)
def test_groups_are_chosen_or_asked_for(
    flags: tuple[str, ...], variables: dict[str, str], asked: AskedGroups
) -> None:
    parser = Parser()
    add_options(parser, config.GROUP_OPTIONS)
    config.check_variables(variables)
    values = config.resolve(config.GROUP_OPTIONS, parser.parse_args(flags), variables)
    assert build(AskedGroups, values) == asked


@pytest.mark.parametrize("text", ["0", "65", "none", "many"])
def test_a_bad_number_of_workers_is_refused_by_name(text: str) -> None:
    parser = Parser()
    add_options(parser, config.GROUP_OPTIONS)
    with pytest.raises(OptionError, match="--workers must be"):
        config.resolve(config.GROUP_OPTIONS, parser.parse_args(["--workers", text]), {})


def test_options_of_a_part_are_set_and_reach_a_child() -> None:
    values: dict[str, Values] = {o.field: o.default for o in options_of(RouterConfig)}
    built: RouterConfig = build(RouterConfig, {**values, "upload_disk": 100})
    assert built.upload.disk == 100
    assert config.config_of(RouterConfig, config.document_of(built)) == built


@pytest.mark.parametrize("flag", RETIRED)
def test_an_option_of_earlier_versions_stops_the_start(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = f"--{flag} is no option any more: {RETIRED[flag]}"
    for words in ((f"--{flag}=7",), (f"--{flag}", "7")):
        with pytest.raises(SystemExit):
            read(*words)
        assert sentence in capsys.readouterr().err
    with pytest.raises(OptionError, match=re.escape(sentence)):
        config.check_variables({f"LORAPLEX_{flag.replace('-', '_').upper()}": "7"})
    known = {o.flag for o in (*config.ROUTER_OPTIONS, *config.WORKER_OPTIONS)}
    assert flag not in known
    assert {word[2:] for word in RETIRED[flag].split() if word.startswith("--")} <= known
