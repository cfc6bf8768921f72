"""Servers that rivals' tests are sent to: one for each model name and its adapters. A few live.

`python -m tests.suites.servers` reads lines of JSON, `[model, *options]`, and answers each with an
address or an error. It is a process of its own: suites have packages of this project's names, too.
"""

import atexit
import json
import shutil
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

from loraplex.launcher import demo
from tests.e2e.serving import Serving, start_serving
from tests.e2e.vector_models import save_classifier, save_embedder

DEMO = Path(demo.__file__).parent
_MOST = 3
_EMBEDDERS = ("e5-small", "MiniLM-L12", "bge-base", "bge-small", "bge_small")
_CLASSIFIERS = ("apeach", "sentiment", "classif")
_RERANKERS = ("reranker", "ms-marco", "reward")
_running: "OrderedDict[tuple[str, ...], Serving]" = OrderedDict()


def url_of(model: str, *options: str) -> str:
    """Where a server answers under that name. It has an adapter for each `--adapter` in options."""
    key = (model, *options)
    if key not in _running:
        while len(_running) >= _MOST:
            _stop(_running.popitem(last=False)[1])
        _running[key] = _start(model, *options)
    _running.move_to_end(key)
    return _running[key].url


def _start(model: str, *options: str) -> Serving:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    served = _model(model, folder)
    folders = ("--adapter-root", str(DEMO / "adapters"), "--cache-dir", str(folder / "cache"))
    known = (*folders, "--model-name", model, "--metrics-compat")
    return start_serving(*served, *known, *options, log=folder / "log")


def _model(model: str, folder: Path) -> tuple[str, ...]:
    if any(part in model for part in _EMBEDDERS):
        return (str(save_embedder(folder)),)
    if any(part in model for part in _CLASSIFIERS):
        return (str(save_classifier(folder, num_labels=2)),)
    if any(part in model for part in _RERANKERS):
        return (str(save_classifier(folder, num_labels=1)),)
    return (str(_demo(folder / "demo")),)


def _demo(folder: Path) -> Path:
    """The demo's base, with room for the prompts of other servers' tests."""
    shutil.copytree(DEMO / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _stop(serving: Serving) -> None:
    serving.process.terminate()
    serving.process.wait(timeout=240)


def _answer(line: str) -> dict[str, str]:
    try:
        return {"url": url_of(*json.loads(line))}
    except AssertionError as error:  # the server did not start
        return {"error": str(error)}


def main() -> None:
    try:
        for line in sys.stdin:
            print(json.dumps(_answer(line)), flush=True)
    finally:
        while _running:
            _stop(_running.popitem()[1])


if __name__ == "__main__":
    main()
