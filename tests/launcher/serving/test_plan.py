"""Adapter names on the command line, and what `serve` makes of its options."""

import dataclasses
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import parse_ref, path_of_local
from loraplex.adapters.sources.local import LocalSource
from loraplex.launcher import config
from loraplex.launcher.bench.engine.offline import SHIPPED
from loraplex.launcher.command_line import Parser, add_options
from loraplex.launcher.options import OptionError
from loraplex.launcher.serving import serve
from loraplex.launcher.serving.plan import ServePlan, plan, resolve_alias
from loraplex.launcher.serving.serve import Serve
from loraplex.server.model.checkpoint.checkpoint import read_config
from loraplex.server.worker.process.device import CudaDevice, TorchBuild

LLAMA_8B = SHIPPED / "llama-3.1-8b"
H100 = CudaDevice("H100", (9, 0), 80 << 30)


def planned(*argv: str) -> ServePlan:
    parser = Parser()
    parser.add_argument("model", nargs="?")
    options = config.serve_options()
    add_options(parser, options)
    return plan(config.resolve(options, parser.parse_args(argv), {}, optional=("model",)))


@pytest.mark.parametrize("prefix", ["", "local:"])
def test_a_folder_becomes_a_local_adapter_and_its_own_root(tmp_path: Path, prefix: str) -> None:
    folder = tmp_path / "pirate"
    folder.mkdir()
    assert resolve_alias(f"p={prefix}{folder}") == (f"p=local:{folder}", (folder,))


@pytest.mark.parametrize("name", ["my adapter", "josé", "a:b", "a@b", "50%20"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    text, roots = resolve_alias(f"p={folder}")
    ref = parse_ref(text.removeprefix("p="))
    assert (path_of_local(ref.name), roots) == (str(folder), (folder,))


@pytest.mark.parametrize("by", ["its path", "a link to it"])
def test_a_snapshot_in_a_hub_cache_is_allowed_with_its_blobs(tmp_path: Path, by: str) -> None:
    cache = tmp_path / "models--org--pirate"
    snapshot, blobs = cache / "snapshots" / "c0ffee", cache / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "abc").write_text("{}")
    (snapshot / "adapter_config.json").symlink_to("../../blobs/abc")
    (tmp_path / "secret").write_text("no")
    (snapshot / "adapter_model.safetensors").symlink_to(tmp_path / "secret")
    named = snapshot
    if by == "a link to it":
        named = tmp_path / "pirate"
        named.symlink_to(snapshot)
    text, roots = resolve_alias(f"p={named}")
    source, ref = LocalSource(roots), parse_ref(text.removeprefix("p="))
    with pytest.raises(
        AdapterError, match="adapter_model.safetensors is a link to a place outside"
    ):
        source.list_files(ref, None)
    (snapshot / "adapter_model.safetensors").unlink()
    assert source.list_files(ref, None) == {"adapter_config.json": 2}


def test_a_folder_that_is_only_called_as_a_caches_is_brings_no_other_root(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "pirate"
    folder.mkdir(parents=True)
    assert resolve_alias(f"p={folder}")[1] == (folder,)


@pytest.mark.parametrize("name", ["a..b", "a\nb"])
def test_but_for_what_no_reference_can_say(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(OptionError, match="no part is empty"):
        resolve_alias(f"p={tmp_path / name}")


def test_a_hub_name_stays(tmp_path: Path) -> None:
    assert resolve_alias("p=hub:org/name@main") == ("p=hub:org/name@main", ())
    assert resolve_alias("p=org/name") == ("p=org/name", ())


@pytest.mark.parametrize(
    "text", ["pirate", "=x", "p=", "p=/no/such/folder", "p=./no-such", "p=hub:../x", "p=a b/c"]
)
def test_bad_aliases_are_named(text: str) -> None:
    with pytest.raises(OptionError, match="--adapter"):
        resolve_alias(text)


def test_options_reach_the_half_they_are_for(tmp_path: Path) -> None:
    folder = tmp_path / "pirate"
    folder.mkdir()
    made = planned("org/model", "--port", "9000", "--kv-memory", "1GiB", f"--adapter=p={folder}")
    assert made.router.port == 9000
    assert (made.worker.host, made.worker.port) == ("127.0.0.1", 0)
    assert made.worker.model == "org/model"
    assert made.worker.kv_memory == 1 << 30
    assert made.worker.adapter_roots == (folder,)
    assert made.router.adapters == (f"p=local:{folder}",)
    assert made.aliases == ("p",)


def test_workers_may_read_what_the_router_watches(tmp_path: Path) -> None:
    folders = (tmp_path / "one", tmp_path / "two")
    made = planned("org/model", *(f"--watch-folder={folder}" for folder in folders))
    assert made.router.watch_folders == folders
    assert made.worker.adapter_roots == folders


def test_a_name_of_the_demos_may_be_given_another_adapter(tmp_path: Path) -> None:
    name = planned().aliases[0]
    made = planned("--adapter", f"{name}={tmp_path}")
    assert [a for a in made.router.adapters if a.startswith(f"{name}=")] == [
        f"{name}=local:{tmp_path}"
    ]
    assert len(made.aliases) == len(planned().aliases)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "/" + "x" * 5000, "./" + "x" * 300])
def test_a_folder_that_cannot_be_is_no_traceback(path: str) -> None:
    with pytest.raises(OptionError, match="--adapter p"):
        planned("--adapter", f"p={path}")


def test_without_a_model_the_demo_is_served(tmp_path: Path) -> None:
    made = planned("--adapter-root", str(tmp_path))
    assert Path(made.worker.model).is_dir()
    assert len(made.aliases) >= 5
    assert tmp_path in made.worker.adapter_roots


@pytest.mark.parametrize(
    ("gpus", "host_gib", "options", "groups", "adapter_gib"),
    [
        (1, 64, (), ((),), None),
        (2, 64, (), ((0,), (1,)), 8),
        (2, 32, (), ((0,), (1,)), 4),
        (2, 32, ("--host-adapter-memory", "6GiB"), ((0,), (1,)), 6),
        (2, 64, ("--workers", "1"), ((0,),), None),
        (2, 64, ("--tp", "2"), ((0, 1),), None),
        (2, 64, ("--device", "cpu", "--workers", "2"), ((), ()), 0.5),
    ],
)
def test_the_machine_is_divided_among_workers(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    host_gib: int,
    options: tuple[str, ...],
    groups: tuple[tuple[int, ...], ...],
    adapter_gib: float | None,
) -> None:
    monkeypatch.setattr(serve, "cuda_devices", lambda: [H100] * gpus)
    monkeypatch.setattr(serve, "torch_build", lambda: TorchBuild("2.9", "12.8"))
    monkeypatch.setattr(serve, "host_bytes", lambda: host_gib << 30)
    found = serve._divided(planned(str(LLAMA_8B), *options), [read_config(LLAMA_8B)])
    assert found.bases[0].groups.gpus == groups
    memory = found.worker.host_adapter_memory
    assert memory == (None if adapter_gib is None else adapter_gib * 2**30)


@pytest.mark.parametrize(
    ("route", "all_write", "said"),
    [
        ("/generate", True, '"parameters": {"max_new_tokens": 64, "adapter_id": "json"}}'),
        ("/generate", False, '"parameters": {"max_new_tokens": 64}}'),
        ("/embed", False, "/embed -H"),
    ],
)
def test_the_line_to_try_is_what_the_first_base_gives(
    route: str, all_write: bool, said: str
) -> None:
    plan = dataclasses.replace(planned("--port", "0"), route=route, all_write=all_write)
    running = Serve(plan, {})
    assert said in running.example()
    assert ("max_new_tokens" in running.example()) == (route == "/generate")
    for worker in running.workers:
        worker.close()


@pytest.mark.parametrize(("auth", "has_key"), [("keys", True), ("none", False)])
def test_the_line_to_try_has_a_key_where_callers_need_one(auth: str, has_key: bool) -> None:
    running = Serve(planned("--port", "0", "--auth", auth), {})
    assert ('-H "Authorization: Bearer $KEY"' in running.example()) == has_key
    for worker in running.workers:
        worker.close()


@pytest.mark.parametrize(
    ("also", "bases"),
    [
        (("./qwen",), ("loraplex/demo", "qwen")),
        (("fast=org/qwen", "org/gemma"), ("loraplex/demo", "fast", "org/gemma")),
    ],
)
def test_further_bases_have_names(also: tuple[str, ...], bases: tuple[str, ...]) -> None:
    found = planned(*(f"--also={text}" for text in also), "--revision=v1")
    assert found.router.bases == bases
    assert tuple(config.model_names[0] for _, config in found.bases) == bases
    assert [config.revision for _, config in found.bases] == ["v1", *(None for _ in also)]


@pytest.mark.parametrize("also", [("=x",), ("x=",), ("a=x", "a=y"), ("loraplex/demo",)])
def test_further_bases_without_a_name_of_their_own(also: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="--also"):
        planned(*(f"--also={text}" for text in also))


def test_folders_of_one_name_are_told_apart_by_options() -> None:
    with pytest.raises(OptionError) as caught:
        planned("/a/model", "--also=/b/model")
    words = "/a/model and /b/model are both called 'model'", "--also NAME=", "--model-name"
    assert all(word in str(caught.value) for word in words)
    found = planned("/a/model", "--model-name=a", "--also=b=/b/model")
    assert found.router.bases == ("a", "b")


@pytest.mark.parametrize(
    ("gpus", "options", "groups"),
    [
        (3, (), (((0,),), ((1,),))),
        (4, ("--workers=2",), (((0,), (1,)), ((2,), (3,)))),
        (1, ("--kv-memory=4GiB",), (((),), ((),))),
        (0, ("--device=cpu",), (((),), ((),))),
    ],
)
def test_the_machine_is_divided_among_bases(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: tuple[str, ...], groups: object
) -> None:
    monkeypatch.setattr(serve, "cuda_devices", lambda: [H100] * gpus)
    monkeypatch.setattr(serve, "torch_build", lambda: TorchBuild("2.9", "12.8"))
    chosen = planned(str(LLAMA_8B), f"--also=b={LLAMA_8B}", *options)
    found = serve._divided(chosen, [read_config(LLAMA_8B)] * 2)
    assert tuple(base.gpus for base, _ in found.bases) == groups


def test_two_bases_do_not_fill_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "cuda_devices", lambda: [H100])
    monkeypatch.setattr(serve, "torch_build", lambda: TorchBuild("2.9", "12.8"))
    chosen = planned(str(LLAMA_8B), f"--also=b={LLAMA_8B}")
    with pytest.raises(OptionError, match="--kv-memory"):
        serve._divided(chosen, [read_config(LLAMA_8B)] * 2)
