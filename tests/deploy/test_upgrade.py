"""An upgrade of everything under streaming load fails no request; `rehearsal` says how."""

from pathlib import Path

import pytest

from tests.deploy.rehearsal import rehearse


@pytest.mark.exhaustive
async def test_an_upgrade_under_load_fails_nobody(tmp_path: Path) -> None:
    load = await rehearse(rounds=1, streams=8, folder=tmp_path)
    assert not load.failures
    assert load.answered >= 16
