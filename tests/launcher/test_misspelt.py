"""Commands, actions and options that are none: said with the nearest that is one."""

import pytest

from loraplex.launcher.__main__ import main


@pytest.mark.parametrize(
    ("words", "usage", "meant"),
    [
        ("sevre", "loraplex [-h]", "; did you mean serve?"),
        ("frobnicate", "loraplex [-h]", None),
        ("serve --adaptr a=b", "loraplex serve [MODEL] [OPTIONS]", "; did you mean --adapter?"),
        ("serve --prot=1", "loraplex serve [MODEL] [OPTIONS]", "; did you mean --port?"),
        ("batch a --out b --strcit", "loraplex batch IN", "; did you mean --strict?"),
        ("adapter lsit", "loraplex adapter [-h]", "; did you mean list?"),
        ("adapter list --urll x", "loraplex adapter list", "; did you mean --url?"),
        ("bench serve --url http://x --conccurency 1", "loraplex bench", "did you mean --concurr"),
        ("bench decode --colour", "loraplex bench decode", None),
        ("serve model other", "loraplex serve", None),
    ],
)
def test_the_nearest_is_named_below_the_commands_usage(
    words: str, usage: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words.split())
    said = capsys.readouterr().err
    assert left.value.code == 2
    assert said.startswith(f"usage: {usage}")
    assert (meant is None) == ("did you mean" not in said)
    assert meant is None or meant in said
