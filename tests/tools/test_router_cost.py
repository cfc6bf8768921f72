"""A router's cost, measured on real processes: small numbers, to see that it measures."""

import json

import pytest

from tools.bench.__main__ import main


@pytest.mark.exhaustive
def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--streams", "4", "--tokens", "40", "--requests", "40", "--burst", "30"]
    main(["router", *arguments, "--json"])
    (line,) = capfd.readouterr().out.splitlines()
    cost = json.loads(line)
    assert cost["streams"] == 4
    assert 0.0 < cost["added_p50_ms"] <= cost["added_p99_ms"]
    assert cost["burst"] == 30
    assert 0.0 < cost["burst_first_ms"] <= cost["burst_last_ms"]
