"""Refusals of `loraplex bench` by its options, before anything begins."""

import pytest

from loraplex.launcher.__main__ import main

SERVE = ("serve", "--url", "http://127.0.0.1:9")
DECODE = ("decode", "--config", "llama-3.1-8b", "--dummy-weights")


@pytest.mark.parametrize(
    "words",
    [
        *((*SERVE, option, "0") for option in ("--concurrency", "--rate", "--burstiness")),
        *((*SERVE, option, "0") for option in ("--requests", "--processes", "--slo-ttft-ms")),
        *((*SERVE, option, "-2") for option in ("--requests", "--first", "--count", "--rate")),
        *((*SERVE, option, "nan") for option in ("--zipf", "--rate", "--burstiness")),
        *((*SERVE, "--burstiness", text) for text in ("1e-200", "1e200")),
        *((*SERVE, "--extra", text) for text in ("{", "[]", "x")),
        (*SERVE, "--prompt", "uniform(20,10)"),
        (*SERVE, "--output", "lognormal(900,1)"),
        (*SERVE, "--api", "none"),
        *((*DECODE, option, "x") for option in ("--batch", "--adapters", "--rank")),
    ],
)
def test_nothing_is_begun(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *words])
    told = capsys.readouterr()
    assert (left.value.code, told.out) == (2, "")
    last = told.err.splitlines()[-1]
    assert "invalid _" not in last
    assert any(word in last for word in ("expected", "invalid choice", "is no window", "required"))


def test_more_processes_than_callers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *SERVE, "--processes", "3", "--concurrency", "2"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "loraplex: --processes must be at most --concurrency\n"
