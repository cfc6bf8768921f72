from loraplex.adapters.common.newest import NewestKept


def test_what_was_written_longest_ago_goes() -> None:
    kept = NewestKept[str, int](2)
    kept["a"] = 1
    kept["b"] = 2
    kept["a"] = 3
    assert kept["b"] == 2  # reading makes nothing newer
    kept["c"] = 4
    assert dict(kept) == {"a": 3, "c": 4}
