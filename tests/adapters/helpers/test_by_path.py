"""Where packages come by PYTHONPATH alone, as with `pip --target`, Bazel and Spark."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]
PROGRAM = """
import asyncio, sys
from loraplex.adapters.chat.conversation import TemplateOptions
from loraplex.adapters.grammar.checker import GrammarChecker
from loraplex.adapters.grammar.limits import GrammarLimits
from loraplex.adapters.grammar.vocabulary import KnownTokens
from loraplex.router.text.template_sandbox import TemplateSandbox

checker = GrammarChecker(KnownTokens([b"</s>", b"a"], (0,), {0: b"</s>"}), GrammarLimits())
checker.check('start: "a"')
checker.close()

async def render() -> str:
    sandbox = TemplateSandbox(1)
    try:
        return await sandbox.render("{{ bos_token }}!", {"bos_token": "<s>"}, [], TemplateOptions())
    finally:
        await sandbox.close()

print(asyncio.run(render()), sys.executable)
"""


def test_helpers_find_the_packages_of_their_parent(tmp_path: Path) -> None:
    """The interpreter is one that has no packages of its own."""
    bare = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    packages = Path(msgspec.__file__).parents[1]
    path = os.pathsep.join((str(ROOT), str(packages)))
    alone = subprocess.run([bare, "-I", "-c", "import msgspec"], capture_output=True)
    assert alone.returncode != 0, "this interpreter has packages: the test would show nothing"
    done = subprocess.run(
        [bare, "-c", PROGRAM], cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["<s>!", str(bare)]
