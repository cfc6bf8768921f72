"""Adapters in the forms that people have, from a Hub through a real router and worker."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from loraplex.adapters.judge import judge_folder
from loraplex.launcher.demo import adapter_paths
from tests.adapters.sharded import cut
from tests.adapters.stub_hub import running_hub
from tests.e2e.serving import Serving, start_serving

WEIGHTS = "adapter_model.safetensors"
FORMS = ("checkpoint-500", "several files", "inner model", "runs/compiled/final")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter in several forms, a folder each."""
    top = tmp_path_factory.mktemp("run")
    for form in FORMS:
        folder = top / form.replace(" ", "-")
        shutil.copytree(adapter_paths()["sql"], folder)
        tensors = load_file(folder / WEIGHTS)
        if form == "inner model":
            tensors = {
                n.replace("model.model.model.", "model.model."): t for n, t in tensors.items()
            }
        elif form == "runs/compiled/final":
            tensors = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    cut(top / "several-files", 3)
    return top


@pytest.fixture(scope="module")
def server(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with running_hub() as hub:
        hub.publish("org/sql", run)
        serving = start_serving(
            *("--cache-dir", str(tmp_path_factory.mktemp("cache"))),
            *("--adapter", "here=" + str(run / FORMS[0])),
            log=tmp_path_factory.mktemp("serve") / "log",
            environ=os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": ""},
        )
        try:
            yield serving
        finally:
            serving.process.terminate()
            assert serving.process.wait(timeout=240) == 0, serving.log.read_text()[-4000:]


def ask(server: Serving, path: str, **body: object) -> tuple[str, str]:
    """The digest of the adapter that answered, and the answer."""
    response = httpx.post(server.url + path, json=body, timeout=240)
    assert response.status_code == 200, response.text
    return response.headers["x-loraplex-adapter-digest"], response.text


@pytest.mark.parametrize("form", FORMS)
def test_every_form_answers_as_the_plain_one(form: str, run: Path, server: Serving) -> None:
    folder = form.replace(" ", "-")
    reference = f"hub:org/sql/{folder}@main"

    def generate(adapter: str) -> tuple[str, str]:
        parameters = {"max_new_tokens": 8, "adapter_id": adapter}
        return ask(server, "/generate", inputs="SELECT", parameters=parameters)

    digest, text = generate(reference)
    assert digest == judge_folder(run / folder).manifest.digest
    assert text == generate("here")[1]
    by_model, _ = ask(server, "/v1/completions", model=reference, prompt="SELECT", max_tokens=4)
    assert by_model == digest
