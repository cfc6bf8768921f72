"""A made-up model with made-up adapters, served, and the commands that load such a server."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from loraplex.adapters.judge import judge_folder
from loraplex.launcher.__main__ import main as loraplex
from loraplex.launcher.bench.engine.offline import SHIPPED, tokenizer_json
from loraplex.launcher.bench.report import Outcome
from loraplex.server.model.card import read_base_spec
from loraplex.server.worker.metrics import WorkerMetrics
from tests.grids import beyond
from tests.launcher.serving.test_serve import Serving
from tests.launcher.test_bench_grid import TINY
from tools.bench.__main__ import main as tool
from tools.bench.streams import growth, parse_counters
from tools.bench.windows import (
    Observed,
    Window,
    gaps_within,
    summarise_window,
    window_table,
)

ADAPTERS = 6
LORA_RANK = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `model`, and `adapters` in eight bits."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "shape").mkdir()
    llama = json.loads((SHIPPED / "llama-3.1-8b" / "config.json").read_text())
    config = {**llama, **TINY, "vocab_size": 1024, "max_position_embeddings": 8192}
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    places = ("--model", str(folder / "model"), "--adapters-in", str(folder / "adapters"))
    what = ("--adapters", str(ADAPTERS), "--rank", str(LORA_RANK), "--adapter-dtype", "float8")
    tool(["make-model", "--config", str(folder / "shape"), *places, *what])
    return folder


@pytest.fixture(scope="module")
def served(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With room for two adapters on the device."""
    serving = Serving(
        tmp_path_factory.mktemp("served"),
        *(str(made / "model"), "--executor", "torch", "--device", "cpu", "--model-name", "base"),
        *("--adapter-root", str(made / "adapters"), "--adapter-slots", "2"),
    )
    try:
        serving.until(lambda: "loraplex: ready at" in serving.text)
        yield serving
    finally:
        os.kill(serving.process.pid, signal.SIGTERM)
        serving.process.wait(30)


def run(*words: str) -> None:
    """Runs the product's `serve`, or a bench of the tools."""
    if words[0] == "serve":
        loraplex(["bench", *words])
    else:
        tool(words)


def bench(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    run(*arguments, "--json")
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def failure(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    """The one line that is printed."""
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == code
    told = capsys.readouterr()
    assert not told.out
    assert len(told.err.splitlines()) == 1, told.err
    return told.err


def test_made_adapters_are_whole_and_each_its_own(made: Path) -> None:
    base = read_base_spec(made / "model", ("base",))
    folders = sorted((made / "adapters").iterdir())
    manifests = [judge_folder(folder, base).manifest for folder in folders]
    assert len({manifest.digest for manifest in manifests}) == ADAPTERS
    assert {manifest.ranks for manifest in manifests} == {(LORA_RANK,)}
    assert {manifest.dtype for manifest in manifests} == {"F8_E4M3"}
    assert set(manifests[0].targets) == set(base.modules_of(0))


def test_nothing_is_overwritten(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(made / "shape"), "--model", str(made / "model")]
    assert "File exists" in failure(capsys, "make-model", *arguments)


@given(st.integers(1, 600), st.sets(st.integers(0, 599), max_size=3))
def test_every_id_of_a_made_tokenizer_has_a_text(vocab_size: int, special: set[int]) -> None:
    inside = sorted(i for i in special if i < vocab_size)
    tokenizer = Tokenizer.from_str(tokenizer_json(vocab_size, inside))
    assert tokenizer.get_vocab_size() == vocab_size
    texts = [tokenizer.id_to_token(i) for i in range(vocab_size)]
    assert len(set(texts)) == vocab_size
    assert sorted(tokenizer.get_added_tokens_decoder()) == inside


@pytest.mark.exhaustive
def test_many_adapters_are_ordered_and_loads_counted(
    served: Serving, made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = ("--url", f"http://127.0.0.1:{served.port}", "--adapters-in", str(made / "adapters"))
    capfd.readouterr()
    for action in ("register", "load", "unload", "load"):
        (orders,) = bench(capfd, "adapters", action, *target, "--count", "4")
        assert (orders["done"], orders["failed"], orders["errors"]) == (4, 0, {})
    with pytest.raises(SystemExit) as left:
        bench(capfd, "adapters", "load", *target)
    orders = json.loads(capfd.readouterr().out)
    assert left.value.code == 1
    assert (orders["done"], orders["failed"]) == (4, ADAPTERS - 4), "two are not registered"
    told = failure(capfd, "adapters", "load", *target, "--first", "4")
    assert told.startswith("loraplex: none of 2 adapters: load failed: 404: ")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--url", "localhost:8080"),
        ("serve", "--url", "http://localhost:99999"),
        ("serve", "--url", "http://localhost:0"),
        ("adapters", "load", "--url", "ftp://localhost"),
        ("streams", "--url", "http://a", "--window", "quiet", "--worker-url", "ws://a"),
    ],
)
def test_addresses_that_are_none_are_reported(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*words)
    assert stopped.value.code == 2
    assert f"url: expected http://host:port or https://host:port, got '{words[-1]}'" in (
        capsys.readouterr().err
    )


def test_a_load_from_several_processes(
    served: Serving, made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = ("--url", f"http://127.0.0.1:{served.port}", "--adapters-in", str(made / "adapters"))
    lengths = ("--prompt", "uniform(4,20)", "--output", "uniform(2,9)")
    capfd.readouterr()
    (summary,) = bench(
        capfd, "serve", *target, *lengths, "--requests", "24", "--processes", "2", "--first", "4"
    )
    assert (summary["completed"], summary["errors"], summary["adapters"]) == (24, {}, 2)
    hit, miss = summary["hit"], summary["miss"]
    assert isinstance(hit, dict)
    assert isinstance(miss, dict)
    assert miss["requests"] >= 2, "the server told who waited"
    assert hit["requests"] + miss["requests"] == 24


@pytest.mark.exhaustive
def test_windows_beside_steady_streams(
    served: Serving, made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = ("--url", f"http://127.0.0.1:{served.port}", "--adapters-in", str(made / "adapters"))
    worker = served.text.partition("routers at ws://")[2].split()[0]
    capfd.readouterr()
    windows = ("--window", "quiet", "--window", "busy:new=20,first=1")
    lengths = ("--stream-prompt", "4", "--stream-output", "8000", "--new-prompt", "8")
    quiet, busy = bench(
        capfd,
        *("streams", *target, *windows, *lengths, "--new-output", "2"),
        *("--streams", "2", "--stream-adapters", "1", "--seconds", "1", "--settle", "0"),
        *("--worker-url", f"http://{worker}"),
    )
    assert quiet["new"] == 0
    assert quiet["tokens_per_s"] > 0  # type: ignore[operator]
    assert busy["new"] > 0  # type: ignore[operator]
    assert busy["new_failed"] == {}
    lookups = busy["lookups"]
    assert isinstance(lookups, dict)
    assert sum(lookups.values()) > 0


@pytest.mark.exhaustive
def test_steady_streams_of_the_base(served: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    options = ("--streams", "2", "--seconds", "1", "--settle", "0", "--stream-output", "8000")
    words = ("streams", "--url", f"http://127.0.0.1:{served.port}", "--window", "quiet", *options)
    for more in ((), ("--stream-adapters", "0")):
        (quiet,) = bench(capfd, *words, *more)
        assert quiet["streams"] == 2
        assert quiet["tokens_per_s"] > 0  # type: ignore[operator]
    told = failure(capfd, *words, "--window", "busy:new=1", code=2)
    assert told == "loraplex: window busy: there is no adapter from 0 on\n"


@pytest.mark.parametrize("api", beyond(1, ["completions", "chat", "lorax"]))
def test_every_api_of_a_real_server(
    api: str, served: Serving, made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whose base is called what it lists; lengths are as drawn, and prompts as it counts them."""
    target = (
        "--url",
        f"http://127.0.0.1:{served.port}/v1/",
        "--adapters-in",
        str(made / "adapters"),
    )
    lengths = ("--prompt", "12", "--output", "uniform(5,9)", "--requests", "6")
    capfd.readouterr()
    (summary,) = bench(
        capfd, "serve", *target, *lengths, "--api", api, "--base-too", "--count", "1"
    )
    assert (summary["completed"], summary["errors"]) == (6, {})
    assert (summary["short"], summary["counted_by_events"]) == (0, 0)
    prompt_tokens = round(float(summary["prompt_tokens_per_s"]) * float(summary["seconds"]))  # type: ignore[arg-type]
    if api == "completions":
        assert prompt_tokens == pytest.approx(6 * 12, rel=0.05)
    else:
        assert prompt_tokens > 6 * 12, "this tokenizer knows few words"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "nothing to make"),
        (("--adapters-in", "/nowhere"), "--adapters-in and --adapters need each other"),
        (("--adapters", "3"), "--adapters-in and --adapters need each other"),
    ],
)
def test_nothing_to_make(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in failure(capsys, "make-model", "--config", "llama-3.1-8b", *words, code=2)


@pytest.mark.parametrize(
    "text", ["", "a b", "x:new", "x:new=-1", "x:first=1.5", "x:rate=3", "x:preload=yes"]
)
def test_bad_windows(text: str) -> None:
    with pytest.raises(ValueError, match="is no window"):
        Window.parse(text)


def test_a_window_and_its_adapters() -> None:
    window = Window.parse("busy:new=2.5,loads=20,first=1,count=2,preload=1")
    assert window == Window("busy", 2.5, 20.0, 1, 2, True)
    assert window.adapters(["a", "b", "c", "d"]) == ("b", "c")
    assert Window.parse("quiet").adapters([]) == ()
    with pytest.raises(ValueError, match="no adapter from 4 on"):
        Window.parse("x:new=1,first=4").adapters(["a"])


@given(st.lists(st.floats(0, 10), max_size=30).map(sorted), st.floats(0, 10), st.floats(0, 10))
def test_gaps_lie_within_the_window(times: list[float], begin: float, end: float) -> None:
    gaps = gaps_within(times, begin, end)
    assert sum(gaps) <= max(0.0, end - begin) + 1e-9
    assert len(gaps) == max(0, sum(begin <= at <= end for at in times) - 1)


def test_a_window_in_figures() -> None:
    """Counters are the worker's own exposition, before and after."""
    metrics = WorkerMetrics()
    before = parse_counters(metrics.meters.render("")[0].decode())
    metrics.load_took("copy", 0.008)
    metrics.load_took("transfer", 0.002)
    metrics.copied_bytes.inc(5e6)
    metrics.lookups.labels("host").inc()
    counts = growth(before, parse_counters(metrics.meters.render("")[0].decode()))
    cold = Outcome("a", False, 0.0, [0.5], 0.6, start="cold")
    warm = Outcome("a", False, 0.0, [0.1], 0.2, start="warm")
    failed = Outcome("a", False, 0.0, error="503")
    streams = [[0.0, 1.0, 1.1, 1.3, 9.0]]
    observed = Observed(
        Window("x", new=1.5), 1.0, 3.0, streams, [cold, warm, failed], ["404: no"], counts
    )
    summary = summarise_window(observed)
    assert summary["itl_ms"] == {"p50": 150.0, "p90": 190.0, "p99": 199.0}
    assert summary["hit_ttft_ms"] == {"requests": 1, "p50": 100.0, "p90": 100.0, "p99": 100.0}
    assert summary["miss_ttft_ms"] == {"requests": 1, "p50": 500.0, "p90": 500.0, "p99": 500.0}
    assert summary["new_failed"] == {"503": 1}
    assert (summary["loads_per_s"], summary["load_mb"]) == (0.5, 5.0)
    assert (summary["copy_ms"], summary["transfer_ms"], summary["stage_ms"]) == (8.0, 2.0, None)
    assert (summary["orders_failed"], summary["first_errors"]) == (
        1,
        {"503": "", "load": "404: no"},
    )
    assert "failed: {'503': 1}, 1 loads, such as" in window_table([summary])


def test_a_cold_adapters_way_by_stages(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    where = ("--config", str(made / "shape"), "--adapters-in", str(made / "adapters"))
    (times,) = bench(capfd, "cold", *where, "--count", "2", "--rounds", "1")
    assert all(value > 0 for name, value in times.items() if name != "sha256_ms")  # type: ignore[operator]
    assert times["first_use_ms"] >= times["judge_ms"] + times["pack_ms"]  # type: ignore[operator]
