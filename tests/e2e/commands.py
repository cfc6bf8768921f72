"""`loraplex adapter` as an operator types it, within this process."""

import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple
from unittest.mock import patch

from loraplex.launcher.__main__ import main
from tests.e2e.serving import Serving


class Done(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def adapter_command(server: Serving, *arguments: str, key: str) -> Done:
    """key: the admin key."""
    out, errors, code = StringIO(), StringIO(), 0
    with (
        redirect_stdout(out),
        redirect_stderr(errors),
        patch.dict(os.environ, LORAPLEX_ADMIN_KEY=key),
    ):
        try:
            main(["adapter", *arguments, "--url", server.url])
        except SystemExit as left:
            code = int(left.code or 0)
    return Done(code, out.getvalue(), errors.getvalue())
