"""An adapter without some targeted modules is marked wherever a router shows it."""

import msgspec

from loraplex.adapters.coverage import coverage_of
from loraplex.adapters.manifest import AdapterManifest
from loraplex.router.names.registration import Registration
from loraplex.server.protocol import AdapterLoad
from tests.router.fake_worker import FakeWorker, make_manifest
from tests.router.serving import Running

CUT = coverage_of(
    [(layer, "q_proj") for layer in range(2)], [(layer, "q_proj") for layer in range(2, 6)]
)
WORDS = "partial: 2 of 6 targeted modules have weights, 4 are missing; 2 of 6 layers: 0-1"
TOLD = {"modules": 2, "targeted_modules": 6, "layers": 2, "targeted_layers": 6, "message": WORDS}


async def load_cut(load: AdapterLoad) -> AdapterManifest:
    coverage = CUT if "cut" in load.ref.name else coverage_of([(0, "q_proj")], [])
    return make_manifest(load.ref.name, coverage=coverage)


async def test_every_answer_shows(router: Running, worker: FakeWorker) -> None:
    worker.loader = load_cut
    post = router.client.post
    for name, told in (("cut", TOLD), ("whole", None)):
        made = await post("/v1/adapters", json={"name": name, "ref": f"hub:org/{name}"})
        assert (made.status_code, made.json()["partial"]) == (200, told)
        assert (await post(f"/v1/adapters/{name}/load")).json()["partial"] == told
        assert (await router.client.get(f"/v1/adapters/{name}")).json()["partial"] == told
        vllm = {"lora_name": f"{name}-too", "lora_path": f"hub:org/{name}"}
        answer = await post("/v1/load_lora_adapter", json=vllm)
        success = f"Success: LoRA adapter '{name}-too' added successfully."
        assert answer.text == success + (f" It is {WORDS}." if told else "")
    listed = (await router.client.get("/v1/adapters")).json()["data"]
    seen = {one["id"]: one["partial"] for one in listed}
    assert (seen["cut"], seen["whole"], seen["pirate"]) == (TOLD, None, None)
    fleet = (await router.client.get("/v1/fleet")).json()["adapters"]
    assert {one["name"]: one["partial"] for one in fleet}["cut-too"] == TOLD


def test_what_an_older_router_wrote_is_still_read() -> None:
    ref = {"source": "hub", "name": "org/a"}
    manifest = {"digest": "d", "base": "b", "targets": [], "ranks": [], "nbytes": 1, "dtype": "F32"}
    content = {"ref": ref, "manifest": manifest}
    row = msgspec.json.encode({"name": "a", "ref": ref, "origin": "api", "content": content})
    registration = msgspec.json.decode(row, type=Registration)
    assert registration.content is not None
    assert registration.content.manifest.partial is None
