"""`serve --also`: two bases with adapters of both behind one router, for the openai client."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from safetensors.torch import load_file, save_file

from loraplex.launcher.demo import BASE_NAME, EXAMPLES, adapter_paths, model_path
from tests.e2e.serving import Serving, start_serving
from tests.e2e.test_structured_clients import CLIENTS_PYTHON, passes

SECOND = "loraplex/second"
# Adapters that clients' scripts ask for: on the first base, and with an ending on the second.
MODELS = ("json", "tools")
# One for each API.
SCRIPTS = ("of_openai", "of_anthropic", "of_hub", "of_cohere", "of_langchain")
TIMEOUT_S = 240.0


def second_model(folder: Path) -> Path:
    """The demo model with one matrix changed: another base, of the same shapes."""
    path = shutil.copytree(model_path(), folder / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] *= 0.5
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def second_adapter(folder: Path, name: str) -> Path:
    """One of the demo's adapters, whose config names the second base."""
    path = shutil.copytree(adapter_paths()[name], folder / name)
    config = json.loads((path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = SECOND
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("bases")
    serving = start_serving(
        f"--also={SECOND}={second_model(folder)}",
        *(f"--adapter={name}-2={second_adapter(folder, name)}" for name in ("sql", *MODELS)),
        f"--adapter-root={second_adapter(folder / 'unnamed', 'polite').parent}",
        *(f"--cache-dir={folder / 'cache'}", f"--files-dir={folder / 'files'}"),
        log=folder / "log",
    )
    try:
        yield serving
    finally:
        serving.process.terminate()
        assert serving.process.wait(TIMEOUT_S) == 0


@pytest.fixture
def client(bases: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bases.url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        yield client


def answer(client: openai.OpenAI, model: str, *, stream: bool = False) -> tuple[str, str]:
    """The answer's text, and what computed it."""
    asked = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": EXAMPLES[0]}],
        max_tokens=24,
        temperature=0,
        stream=stream,
    )
    if isinstance(asked, openai.Stream):
        chunks = list(asked)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        return text, chunks[0].system_fingerprint or ""
    return asked.choices[0].message.content or "", asked.system_fingerprint or ""


def test_adapters_of_both_answer(client: openai.OpenAI) -> None:
    found = {}
    for model in (BASE_NAME, SECOND, "sql", "sql-2", "local:polite"):
        found[model] = answer(client, model)
        assert answer(client, model, stream=True) == found[model]
    base_of = {model: fingerprint[3:13] for model, (_, fingerprint) in found.items()}
    assert base_of["sql"] == base_of[BASE_NAME] != base_of[SECOND]
    assert base_of["sql-2"] == base_of["local:polite"] == base_of[SECOND]
    assert answer(client, f"{SECOND}:sql-2") == found["sql-2"]
    models = {model.id: model.model_dump()["parent"] for model in client.models.list()}
    assert (models[BASE_NAME], models[SECOND]) == (None, None)
    assert (models["sql"], models["sql-2"]) == (BASE_NAME, SECOND)


def test_adapters_of_the_other_base_are_refused(client: openai.OpenAI) -> None:
    for model in (f"{BASE_NAME}:sql-2", f"{SECOND}:sql"):
        with pytest.raises(openai.UnprocessableEntityError, match="wrong_base"):
            answer(client, model)


@pytest.mark.exhaustive
@pytest.mark.clients
@pytest.mark.skipif(
    not CLIENTS_PYTHON.exists(), reason="`make test` makes the environment for these clients"
)
@pytest.mark.parametrize("ending", ["", "-2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_clients_get_what_they_ask_each_base_for(bases: Serving, script: str, ending: str) -> None:
    models = [f"{name}{ending}" for name in MODELS]
    passes(str(CLIENTS_PYTHON), "-m", f"tests.e2e.clients.{script}", bases.url, *models)


@pytest.mark.exhaustive
def test_one_base_dies_and_the_other_goes_on(bases: Serving, client: openai.OpenAI) -> None:
    before = answer(client, "sql")
    (worker,) = [
        child
        for child in psutil.Process(bases.process.pid).children()
        if "--started-as=worker-1" in child.cmdline()
    ]
    stream = client.completions.create(
        model=BASE_NAME, prompt="The", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    worker.send_signal(signal.SIGKILL)
    assert answer(client, "sql") == before
    assert sum(len(chunk.choices) for chunk in stream) > 100
    assert answer(client, "sql-2")[0]  # it waits for the new worker
