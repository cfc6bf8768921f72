"""Long tests that a change asks for."""

import pytest

from tests.changed import asked_by, changed_paths, files_of, outermost

FOLDERS = {
    *("tests/router", "tests/router/api", "tests/router/generation", "tests/server"),
    *("tests/server/worker", "tests/server/model/sharding"),
    *("tests/kernels", "tests/e2e", "tests/deploy"),
}


def test_a_file_moved_as_it_was_is_no_change() -> None:
    told = "M\0router/call.py\0R100\0old.py\0new.py\0R093\0a.py\0b.py\0D\0gone.py\0"
    assert list(changed_paths(told)) == ["router/call.py", "b.py", "gone.py"]
    assert list(changed_paths("")) == []


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("router/api/chat.py", ["tests/router/api"]),
        ("router/api/openai/chat.py", ["tests/router/api"]),
        ("router/call.py", ["tests/router"]),
        ("router/generation/answer.py", ["tests/router/generation", "tests/chaos", "tests/e2e"]),
        ("router/http/server.py", ["tests/router", "tests/chaos", "tests/e2e"]),
        ("server/worker/adapters/ahead.py", ["tests/server/worker", "tests/chaos", "tests/e2e"]),
        ("router/console/chart.js", ["tests/router", "tests/e2e"]),
        ("router/policy/queue/limits.py", ["tests/router", "tests/tools"]),
        ("server/kernels/lora/expand.py", ["tests/kernels", "tests/server/model"]),
        ("server/model/devices/group.py", ["tests/server/model/sharding", "tests/e2e"]),
        ("launcher/worker_groups.py", ["tests/e2e"]),
        ("constraints.txt", ["tests/kernels"]),
        ("deploy/helm/values.yaml", ["tests/deploy"]),
        ("tests/router/test_main.py", ["tests/router/test_main.py"]),
        ("tests/kernels/batches.py", ["tests/kernels"]),
        ("tests/grids.py", []),
        ("pyproject.toml", []),
        ("elsewhere/file.py", []),
    ],
)
def test_a_change_asks_for_the_tests_of_its_room(path: str, tests: list[str]) -> None:
    assert list(asked_by(path, FOLDERS)) == tests


def test_a_folder_holds_its_files() -> None:
    paths = ["tests/e2e/test_a.py", "tests/e2e", "tests/e2e2/test_b.py", "tests/e2e"]
    assert outermost(paths) == ["tests/e2e", "tests/e2e2/test_b.py"]


def test_files_of_collected_tests() -> None:
    told = "tests/a.py::test_one[1::2]\ntests/a.py::test_two\ntests/b.py::T::test\n\n3 tests"
    assert files_of(told) == ["tests/a.py", "tests/b.py"]
