"""Two tenants own one name on a real server, each with an adapter of its own."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.commands import Done, adapter_command
from tests.e2e.serving import Serving, start_serving

# `tests/router/names` has a router and tenants in a short run.
pytestmark = pytest.mark.exhaustive

ADMIN = "e2e-admin-key"
# What `bot` means to each tenant: an adapter of the demo.
BOTS = {"acme": "sql", "globex": "pirate", "other": "polite"}
DIGEST = "x-loraplex-adapter-digest"


def key_of(tenant: str) -> str:
    return f"lpx_of_{tenant}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The fleet's name and acme's are the file's; globex's is registered from a shell."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "admin").write_text(ADMIN)
    hashes = {tenant: hashlib.sha256(key_of(tenant).encode()).hexdigest() for tenant in BOTS}
    keys = [{"id": tenant, "tenant": tenant, "sha256": value} for tenant, value in hashes.items()]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    paths = adapter_paths()
    entries = [
        {"name": "bot", "ref": f"local:{paths[BOTS['other']]}"},
        {"name": "bot", "tenant": "acme", "ref": f"local:{paths[BOTS['acme']]}"},
    ]
    (folder / "adapters.json").write_text(json.dumps({"adapters": entries}))
    server = start_serving(
        *("--cache-dir", str(folder / "cache"), "--adapter-root", str(paths["sql"].parent)),
        *("--admin-key-file", str(folder / "admin"), "--keys-file", str(folder / "keys.json")),
        *("--adapters-file", str(folder / "adapters.json")),
        log=folder / "log",
    )
    try:
        done = command(server, "register", "bot", f"local:{paths[BOTS['globex']]}")
        assert done.returncode == 0, done.stderr
        yield server
    finally:
        server.process.terminate()
        code = server.process.wait(timeout=240)
    assert code == 0, server.log.read_text()[-4000:]


def command(server: Serving, action: str, *arguments: str, tenant: str = "globex") -> Done:
    return adapter_command(server, action, *arguments, "--tenant", tenant, key=ADMIN)


def ask(server: Serving, tenant: str, model: str, prompt: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    return httpx.post(
        f"{server.url}/v1/chat/completions",
        json={**body, "max_tokens": 40},
        headers={"authorization": f"Bearer {key_of(tenant)}"},
        timeout=240,
    )


def said(answer: httpx.Response) -> tuple[str, str]:
    """Text and digest."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.headers[DIGEST]


def test_one_name_gives_each_tenant_its_own_answers(server: Serving) -> None:
    """All at once, with the same prompts over and over, so that no cache may mix them."""
    asked: list[tuple[str, str]] = [(tenant, prompt) for prompt in EXAMPLES for tenant in BOTS] * 3
    expected = {
        (tenant, prompt): said(ask(server, tenant, BOTS[tenant], prompt))
        for tenant, prompt in set(asked)
    }
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: said(ask(server, one[0], "bot", one[1])), asked))
    assert answers == [expected[one] for one in asked]
    for prompt in EXAMPLES:
        texts = {expected[tenant, prompt] for tenant in BOTS}
        assert len(texts) == len(BOTS), "the adapters say different things"


def test_an_operator_moves_one_and_the_other_stays(server: Serving) -> None:
    prompt = EXAMPLES[0]
    before = {tenant: said(ask(server, tenant, "bot", prompt)) for tenant in BOTS}
    listed = json.loads(command(server, "list", "--json").stdout)["data"]
    assert [(one["id"], one["tenant"]) for one in listed] == [("bot", "globex")]
    assert command(server, "unload", "bot").returncode == 0
    assert ask(server, "globex", "bot", prompt).status_code == 409, "not the fleet's instead"
    for tenant in ("acme", "other"):
        assert said(ask(server, tenant, "bot", prompt)) == before[tenant]
    refused = command(server, "delete", "bot", tenant="acme")
    assert (refused.returncode, "the adapters file" in refused.stderr) == (1, True)
    deleted = command(server, "delete", "bot")
    assert deleted.stdout == "globex::bot deleted\n"
    assert said(ask(server, "globex", "bot", prompt)) == before["other"], "the fleet's is left"
    assert said(ask(server, "acme", "bot", prompt)) == before["acme"]
    again = command(server, "register", "bot", f"local:{adapter_paths()[BOTS['globex']]}")
    assert again.stdout.splitlines()[1].split()[:3] == ["bot", "globex", "ready"]
    assert said(ask(server, "globex", "bot", prompt)) == before["globex"]


def test_each_sees_and_pays_for_its_own(server: Serving) -> None:
    def get(path: str, key: str) -> Any:
        answer = httpx.get(f"{server.url}{path}", headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    for tenant in BOTS:
        assert ask(server, tenant, "bot", "Hi").status_code == 200
        names = [model["id"] for model in get("/v1/models", key_of(tenant))]
        assert names.count("bot") == 1
        (row,) = [r for r in get("/v1/usage", key_of(tenant)) if r["adapter"] == "bot"]
        assert row["tenant"] == tenant
    records = [r for r in get("/v1/audit", ADMIN) if r["target"] == "bot"]
    assert {record["tenant"] for record in records} >= {"globex"}
