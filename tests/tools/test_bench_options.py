"""Refusals of the tools' benches by their options, before anything begins."""

import pytest

from tools.bench.__main__ import BENCHES, main

MAKE = ("make-model", "--config", "llama-3.1-8b")
STREAMS = ("streams", "--url", "http://127.0.0.1:9", "--window", "w")


@pytest.mark.parametrize(
    "words",
    [
        ("throughput",),
        *((*STREAMS, option, "-1") for option in ("--streams", "--stream-adapters", "--settle")),
        *((*STREAMS, option, "0") for option in ("--streams", "--seconds", "--new-output")),
        (*STREAMS, "--window", "x:new=-1"),
        (
            "adapters",
            "load",
            "--url",
            "http://127.0.0.1:9",
            "--adapters-in",
            ".",
            "--concurrency",
            "0",
        ),
        ("adapters", "load", "--url", "http://127.0.0.1:9"),
        ("cold", "--config", "x", "--adapters-in", ".", "--rounds", "0"),
        *((*MAKE, option, "-1") for option in ("--rank", "--threads", "--adapters", "--first")),
        ("router", "--requests", "0"),
        ("placement", "--workers", "0"),
        ("placement", "--zipf", "nan"),
        ("lora-kernels", "--replays", "0"),
    ],
)
def test_nothing_is_begun(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    told = capsys.readouterr()
    assert (left.value.code, told.out) == (2, "")
    last = told.err.splitlines()[-1]
    assert "invalid _" not in last
    assert any(word in last for word in ("expected", "invalid choice", "is no window", "required"))


@pytest.mark.parametrize("name", BENCHES)
def test_each_bench_says_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m tools.bench {name} ")
