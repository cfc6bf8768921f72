"""The known models of every family are served, and `loraplex info` lists the families."""

import pytest

from loraplex.launcher.__main__ import main
from loraplex.launcher.known_models import served_families
from loraplex.server.model.families.registry import architectures, read_model


def test_each_example_is_served_and_of_its_family() -> None:
    for name, known in served_families().items():
        assert known.covers, f"{name}: known_models.json does not say what it covers"
        assert read_model({**known.config, "architectures": [architectures()[name]]})


def test_info_lists_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info"])
    listed = capsys.readouterr().out.partition("families of models:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == sorted(architectures())
