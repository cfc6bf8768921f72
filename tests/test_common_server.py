"""Files that are handed out together, and files that are alone."""

from tests.common_server import E2E, scope_of


def test_files_of_the_common_server_stay_together() -> None:
    common = ("test_invocations.py", "test_drafts.py", "test_console_batches.py", "test_tools.py")
    assert {scope_of(E2E + file) for file in common} == {E2E}
    own = ("tests/e2e/test_lifecycle.py", "tests/test_ports.py")
    assert [scope_of(file) for file in own] == [*own]
