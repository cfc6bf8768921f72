"""The order of files in a run."""

from tests.longest_first import longest_first


def test_long_files_come_first_and_others_stay_in_order() -> None:
    names = ["a.py::one", "b.py::one", "b.py::two", "c.py::one", "d.py::one[b.py::x]"]
    assert longest_first(names, {"b.py": 3.0, "d.py": 9.0, "gone.py": 99.0}) == [4, 1, 2, 0, 3]
    assert longest_first(names, {}) == [0, 1, 2, 3, 4]
