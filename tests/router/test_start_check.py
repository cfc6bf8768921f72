"""Wrong options are reported before anything runs, by the option's name."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from loraplex.router.config import RouterConfig, RouterConfigError
from loraplex.router.start_check import check_options

HERE = Path(__file__).parent
GOOD = HERE.parent / "adapters" / "self_signed.pem"
KEYS = HERE / "pem"


def refused(**options: Any) -> str:
    with pytest.raises(RouterConfigError) as caught:
        check_options(RouterConfig(**options))
    return str(caught.value)


def named_file(folder: Path, content: bytes) -> Path:
    path = folder / "named"
    path.write_bytes(content)
    return path


def test_what_is_right_is_accepted(tmp_path: Path) -> None:
    adapters, keys = tmp_path / "adapters.yaml", tmp_path / "keys.yaml"
    adapters.write_text("adapters: [{name: sql, ref: org/sql}, {name: a/b, ref: org/sql}]")
    keys.write_text("keys: []")
    check_options(RouterConfig())
    files = RouterConfig(
        adapters_file=adapters,
        keys_file=keys,
        tls_cert=GOOD,
        tls_key=GOOD,
        workers=("ws://gpu-1:8090", "wss://[::1]:8090/"),
        adapters=("sql=hub:org/sql",),
        redis="redis://somewhere:6379",
        cors_origins=("*", "https://app.example", "http://[::1]:3000", "tauri://localhost"),
        hub_owners=("acme",),
    )
    check_options(files)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user@h:6379/15",
        "rediss://h/0",
        f"rediss://h:6380?ssl_ca_certs={GOOD}&ssl_cert_reqs=required",
        "unix:///run/redis.sock?db=3",
        "redis+sentinel://a:1,b/main",
    ],
)
def test_a_redis_that_may_be(url: str) -> None:
    check_options(RouterConfig(redis=url))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"auth": "none", "keys_file": HERE / "keys.yaml"}, "--keys-file: with --auth none nobody"),
        ({"share_hub_token": True}, "LORAPLEX_HUB_TOKEN or HF_TOKEN"),
        ({"uds": HERE / "socket", "router_processes": 2}, "--uds is one router's"),
        ({"uds": HERE / "socket", "tls_cert": HERE / "a.pem"}, "--uds is one router's"),
        ({"max_tenant_queue": 9, "max_queue": 8}, "--max-tenant-queue 9 is more than"),
    ],
)
def test_what_another_option_makes_void(options: dict[str, Any], words: str) -> None:
    assert words in refused(**options)


def test_what_no_option_makes_void() -> None:
    check_options(RouterConfig(auth="none"))
    check_options(RouterConfig(share_hub_token=True, hub_token="hf_x"))
    check_options(RouterConfig(max_tenant_queue=8, max_queue=8))


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_a_certificate_wants_its_key(given: str) -> None:
    assert "give both" in refused(**{given: GOOD})


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("another_ec_key.pem", "it is not the key of the certificate"),
        ("another_rsa_key.pem", "it is not the key of the certificate"),
        ("encrypted_key.pem", "it is encrypted"),
        ("encrypted_key_of_old.pem", "it is encrypted"),
        ("absent.pem", "No such file"),
        ("", "Is a directory"),
    ],
)
def test_a_key_that_cannot_be_used(key: str, why: str) -> None:
    said = refused(tls_cert=GOOD, tls_key=KEYS / key)
    assert said.startswith(f"--tls-key {KEYS / key}: {why}")


def test_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    for cert, why in (
        (KEYS / "another_ec_key.pem", "it holds no certificate in PEM"),
        (KEYS / "too_small.pem", "OpenSSL says EE_KEY_TOO_SMALL"),
        (tmp_path / "absent.pem", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        said = refused(tls_cert=cert, tls_key=cert)
        assert said.startswith(f"--tls-cert {cert}: {why}")


@pytest.mark.parametrize("option", ["tls_cert", "tls_key"])
@pytest.mark.parametrize("part", ["empty", "der", "cut"])
def test_pem_that_is_none(tmp_path: Path, option: str, part: str) -> None:
    text = GOOD.read_bytes()
    kind = b"CERTIFICATE" if option == "tls_cert" else b"PRIVATE KEY"
    begin, end = (b"-----%s %s-----\n" % (word, kind) for word in (b"BEGIN", b"END"))
    body = text.partition(begin)[2].partition(end)[0]
    content = {"empty": b"", "der": b"\x30\x82", "cut": begin + body[:64] + b"\n" + end}[part]
    path = named_file(tmp_path, content)
    said = refused(**({"tls_cert": GOOD, "tls_key": GOOD} | {option: path}))
    assert said.startswith(f"--{option.replace('_', '-')} {path}: ")
    assert ("damaged" if part == "cut" else "in PEM") in said


@pytest.mark.parametrize(
    ("name", "why"),
    [("absent", "there is no such folder"), ("file", "there is no such folder"), ("a\nb", "%20")],
)
def test_a_watched_folder_must_be_there_and_be_named(tmp_path: Path, name: str, why: str) -> None:
    named_file(tmp_path, b"").rename(tmp_path / "file")
    (tmp_path / "a\nb").mkdir()
    folder = tmp_path / name
    said = refused(watch_folders=(tmp_path, folder))
    assert said.startswith(f"--watch-folder {folder}: ")
    assert why in said


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"adapters: [", "" ),
        (b"", "expected one key, `adapters`"),
        (b"- name: x", "expected one key, `adapters`"),
        (b"\xff\xfe", ""),
    ],
)  # fmt: skip
def test_an_adapters_file_that_says_nothing(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "absent" if content is None else named_file(tmp_path, content)
    said = refused(adapters_file=path)
    assert said.startswith(f"--adapters-file {path}: ")
    assert why in said


FILES = {field.name for field in dataclasses.fields(RouterConfig) if "Path" in str(field.type)}


@pytest.mark.parametrize(
    "option",
    sorted(FILES - {"cache_dir", "files_dir", "tls_cert", "tls_key", "uds", "watch_folders"}),
)
def test_every_file_that_is_named_must_be_there(tmp_path: Path, option: str) -> None:
    """But folders, which are made."""
    for path in (tmp_path / "absent", tmp_path):
        said = refused(**{option: path})
        assert said.startswith(f"--{option.replace('_', '-')}")
        assert str(path) in said


def test_a_folder_of_files_must_be_possible(tmp_path: Path) -> None:
    check_options(RouterConfig(files_dir=tmp_path / "made"))
    assert (tmp_path / "made/tenants").is_dir()
    (tmp_path / "file").write_text("x")
    said = refused(files_dir=tmp_path / "file")
    assert said.startswith("--files-dir")
    assert str(tmp_path / "file") in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": ("gpu-1:8090",)}, "--worker 'gpu-1:8090': expected ws://"),
        ({"workers": ("ws://gpu:port",)}, "--worker 'ws://gpu:port'"),
        ({"workers": ("ws://gpu:99999",)}, "--worker 'ws://gpu:99999'"),
        ({"workers": ("ws://gpu/path",)}, "--worker 'ws://gpu/path'"),
        ({"workers": ("ws://[gpu",)}, "--worker 'ws://[gpu'"),
        ({"workers": ("ws://a..b:80",)}, "--worker 'ws://a..b:80'"),
        ({"adapters": ("sql",)}, "--adapter 'sql': expected NAME=REF"),
        ({"adapters": ("a b=org/x",)}, "--adapter 'a b=org/x': ' ' is not allowed in a name: a-z"),
        ({"adapters": ("=org/x",)}, "--adapter '=org/x': expected NAME=REF"),
        ({"adapters": ("tgi=org/x",)}, "--adapter 'tgi=org/x': clients mean the base model"),
        ({"adapters": ("sql=plain",)}, "--adapter 'sql=plain': 'plain' names no source"),
        ({"host": "0.0.0.0"}, "--host: callers of 0.0.0.0 need keys"),
        ({"admin_key": "clé"}, "--admin-key-file: the key must be ASCII"),
        ({"secret": "clé"}, "--secret-file: the key must be ASCII"),
        ({"redis": "localhost"}, "--redis: expected"),
        ({"adapters": ("a=org/x", "b=org/x", "a=org/y")}, "--adapter: the name 'a' is given more"),
        ({"hub_owners": ("acme/sql",)}, "--hub-owner 'acme/sql'"),
        ({"cors_origins": ("app.example",)}, "--cors-origin 'app.example'"),
        ({"cors_origins": ("https://app.example/",)}, "--cors-origin 'https://app.example/'"),
        ({"cors_origins": ("https://App.example",)}, "--cors-origin 'https://App.example'"),
        ({"redis": "redis://h:port"}, "--redis: "),
        ({"redis": "redis://h:99999"}, "--redis: "),
        ({"redis": "redis://h/name"}, "--redis: expected redis://host:port/database"),
        ({"redis": "redis://h/3/4"}, "--redis: expected redis://host:port/database"),
        ({"redis": "redis://:1/0"}, "--redis: expected redis://host:port/database"),
        ({"redis": "unix://"}, "--redis: expected unix:///path"),
        ({"redis": "rediss://h?foo=1"}, "--redis: of its parameters: "),
        ({"redis": "rediss://h?ssl_cert_reqs=some"}, "--redis: of its parameters: "),
        ({"redis": "rediss://h?ssl_ca_certs=/nope"}, "--redis: ssl_ca_certs=/nope cannot be used"),
        ({"otlp_endpoint": "http://h:99999"}, "--otlp-endpoint: "),
        ({"otlp_endpoint": "collector:4318"}, "--otlp-endpoint: expected http://"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], why: str) -> None:
    assert refused(**options).startswith(why)


def test_formats_have_names() -> None:
    check_options(RouterConfig(tool_format="hermes", reasoning_format="none"))
    assert refused(tool_format="none").startswith("--tool-format 'none': expected one of auto")
    assert refused(reasoning_format="x").startswith("--reasoning-format 'x': expected one of auto")
