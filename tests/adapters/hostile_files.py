"""Corrupt safetensors, files of a wrong kind, and tokenizer files that change the vocabulary."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loraplex.adapters.base import BaseSpec
from tests.adapters.spoils import (
    FIRST,
    WEIGHTS,
    Exploding,
    Spoil,
    both,
    config,
    directory,
    entry,
    fifo,
    file,
    header,
    header_text,
    link,
    moved,
    pickled,
    sparse,
    unix_socket,
    weights_bytes,
)

CONFIG = "adapter_config.json"
_ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def cases(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    """Name -> how a good folder is spoiled, and exactly what is found."""
    parts = {
        "frame": _frames(),
        "header": _headers(),
        "entry": _entries(),
        "file": _files(),
        "tokenizer": _tokenizers(base),
    }
    return {
        f"{part}: {name}": case for part, found in parts.items() for name, case in found.items()
    }


def _frames() -> dict[str, tuple[Spoil, set[str]]]:
    found: dict[str, tuple[Spoil, set[str]]] = {}
    for name, magic in {
        "html": b"<!DOCTYPE html>",
        "lfs pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "zip": b"PK\x03\x04" + b"\x14" * 60,
        "gguf": b"GGUF\x03\0\0\0\x01" + b"\0" * 60,
        "elf": b"\x7fELF\x02\x01\x01\0" + b"\0" * 60,
        "numpy": b"\x93NUMPY\x01\0" + b"\0" * 60,
        "pickle": pickle.dumps(Exploding()),
    }.items():
        found[name] = (file(WEIGHTS, magic), {"header_too_large"})
    return found | {
        "empty": (weights_bytes(lambda d: b""), {"truncated"}),
        "seven bytes": (weights_bytes(lambda d: d[:7]), {"truncated"}),
        "half a header": (weights_bytes(lambda d: d[:100]), {"truncated"}),
        "last byte lost": (weights_bytes(lambda d: d[:-1]), {"truncated"}),
        "half the data": (weights_bytes(lambda d: d[: len(d) // 2]), {"truncated"}),
        "byte appended": (weights_bytes(lambda d: d + b"\0"), {"trailing_bytes"}),
        "zip appended": (weights_bytes(lambda d: d + b"PK\x03\x04" * 50), {"trailing_bytes"}),
        "sparse tail of 100 MB": (sparse(WEIGHTS, 100 << 20), {"trailing_bytes"}),
        "header of 2**64": (weights_bytes(lambda d: b"\xff" * 8 + d[8:]), {"header_too_large"}),
        "header of 100 MB": (
            weights_bytes(lambda d: struct.pack("<Q", 100 << 20) + d[8:]),
            {"header_too_large"},
        ),
        "header of 0": (weights_bytes(lambda d: b"\0" * 8 + d[8:]), {"bad_header"}),
        "header one byte short": (
            weights_bytes(lambda d: struct.pack("<Q", struct.unpack("<Q", d[:8])[0] - 8) + d[8:]),
            {"bad_header"},
        ),
    }


def _headers() -> dict[str, tuple[Spoil, set[str]]]:
    bad: dict[str, str | bytes] = {
        "a list": "[]",
        "after a space": " {}",
        "byte order mark": b"\xef\xbb\xbf{}",
        "not utf-8": b'{"\xff":{}}',
        "two documents": "{}{}",
        "nan": '{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        "unclosed": '{"a":' * 5000,
        "deep": '{"a":' + "[" * 20_000 + "]" * 20_000 + "}",
        "of lists": '{"a":[' + "[]," * 200_000 + "[]]}",
        "number of 5000 digits": '{"a":{"shape":[' + "9" * 5000 + "]}}",
        "nul bytes": b"{" + b"\0" * 64,
    }
    found: dict[str, tuple[Spoil, set[str]]] = {
        name: (header_text(text), {"bad_header"}) for name, text in bad.items()
    }
    twice = f'{{"a":{_ONE},"a":{_ONE}}}'
    return found | {
        "tensor twice": (header_text(twice), {"duplicate_key"}),
        "tensor twice, once escaped": (
            header_text(f'{{"a":{_ONE},"\\u0061":{_ONE}}}'),
            {"duplicate_key"},
        ),
        "dtype twice": (
            header_text('{"a":{"dtype":"F32","dtype":"F16","shape":[1],"data_offsets":[0,4]}}'),
            {"duplicate_key"},
        ),
        "30000 tensors": (
            header(lambda h: {f"t{i}": {} for i in range(30_000)}),
            {"too_many_tensors"},
        ),
        "metadata of numbers": (header(lambda h: h | {"__metadata__": {"a": 1}}), {"bad_metadata"}),
        "metadata a list": (header(lambda h: h | {"__metadata__": ["a"]}), {"bad_metadata"}),
        "metadata of 5000": (
            header(lambda h: h | {"__metadata__": {f"k{i}": "" for i in range(5000)}}),
            {"bad_metadata"},
        ),
        "metadata twice": (
            header_text('{"__metadata__":{},"__metadata__":{}}'),
            {"duplicate_key"},
        ),
        "name of 1 MB": (header(lambda h: h | {"x" * (1 << 20): {}}), {"bad_tensor_name"}),
        "name with newline": (header(lambda h: h | {"x\n": {}}), {"bad_tensor_name"}),
        "name empty": (header(lambda h: h | {"": h[FIRST]}), {"bad_tensor_name"}),
        "name a surrogate": (header(lambda h: h | {"\ud800": {}}), {"bad_tensor_name"}),
    }


def _entries() -> dict[str, tuple[Spoil, set[str]]]:
    def offsets(*new: object) -> Spoil:
        return entry(data_offsets=list(new))

    def shifted(by: int) -> Spoil:
        return entry(data_offsets=lambda old: [old[0] + by, old[1] + by])

    spans = {
        "negative": offsets(-4, 4),
        "reversed": offsets(8, 4),
        "of floats": offsets(0.0, 4.0),
        "three": offsets(0, 4, 8),
        "true": offsets(False, True),
        "null": entry(data_offsets=None),
        "text": offsets("0", "4"),
        "2**64": offsets(2**64, 2**64 + 1024),
        "of 4000 digits": offsets(10**4000, 10**4000 + 1024),
    }
    shapes = {
        "negative": [-8, 32],
        "of floats": [8.0, 32.0],
        "text": "8x32",
        "nested": [[8], [32]],
        "of 9": [1] * 9,
        "of 2**63": [2**63, 2**63],
        "true": [True, 32],
        "null": None,
    }
    found: dict[str, tuple[Spoil, set[str]]] = {
        f"span {name}": (spoil, {"bad_offsets"}) for name, spoil in spans.items()
    }
    found |= {f"shape {name}": (entry(shape=s), {"bad_shape"}) for name, s in shapes.items()}
    for dtype in ("Q4_K", "f32", "F4", "", 32, None, ["F32"]):
        found[f"dtype {dtype!r}"] = (entry(dtype=dtype), {"unknown_dtype"})
    odds: dict[str, object] = {"a list": [], "null": None, "text": "x", "empty": {}}
    for name, odd in odds.items():
        found[f"is {name}"] = (header(_replaced(odd)), {"bad_tensor_entry"})
    return found | {
        "has more keys": (entry(strides=[1]), {"bad_tensor_entry"}),
        "gap": (
            both(shifted(4), weights_bytes(lambda d: d + b"\0" * 4)),
            {"gap", "overlap", "trailing_bytes"},
        ),
        "overlap": (
            entry(data_offsets=lambda old: [old[0] + 4, old[1] + 4]),
            {"gap", "overlap"},
        ),
        "same span twice": (header(lambda h: h | {"copy": h[FIRST]}), {"overlap"}),
        "dtype of other width": (entry(dtype="F16"), {"span_mismatch"}),
        "larger shape": (entry(shape=[1 << 39, 1 << 39]), {"span_mismatch"}),
    }


def _replaced(value: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: found | {FIRST: value}


def _files() -> dict[str, tuple[Spoil, set[str]]]:
    def gone(folder: Path) -> None:
        (folder / WEIGHTS).unlink()

    def no_config(folder: Path) -> None:
        (folder / CONFIG).unlink()

    kinds: dict[str, Spoil] = {
        "weights are a fifo": fifo(WEIGHTS),
        "config is a fifo": fifo(CONFIG),
        "both are fifos": both(fifo(CONFIG), fifo(WEIGHTS)),
        "weights are a folder": directory(WEIGHTS),
        "config is a folder": directory(CONFIG),
        "weights are a socket": unix_socket(WEIGHTS),
        "weights are a device": link(WEIGHTS, "/dev/zero"),
        "config is a device": link(CONFIG, "/dev/null"),
        "config is a terminal": link(CONFIG, "/dev/tty"),
        "weights link to themselves": link(WEIGHTS, WEIGHTS),
        "weights link nowhere": link(WEIGHTS, "gone"),
        "tokenizer is a fifo": fifo("tokenizer.json"),
        "template is a folder": directory("chat_template.jinja"),
    }
    found: dict[str, tuple[Spoil, set[str]]] = {
        name: (spoil, {"not_a_file"}) for name, spoil in kinds.items()
    }
    for suffix in ("bin", "pt", "pth", "ckpt", "pkl", "pickle"):
        found[f"pickle .{suffix}"] = (pickled(f"adapter_model.{suffix}"), {"unsafe_format"})
    return found | {
        "no config": (no_config, {"missing_file"}),
        "no weights": (gone, {"missing_file"}),
        "nothing": (both(no_config, gone), {"missing_file"}),
        "pickle .BIN": (pickled("ADAPTER_MODEL.BIN"), {"unsafe_format"}),
        "pickle, no config": (
            both(no_config, pickled("adapter_model.bin")),
            {"missing_file", "unsafe_format"},
        ),
        "pickle, lying config": (
            both(config(use_qalora=True, r=0), pickled("adapter_model.bin")),
            {"unsafe_format", "unsupported_feature", "bad_value"},
        ),
        "shards": (moved(WEIGHTS, "adapter_model-00001-of-00002.safetensors"), {"missing_file"}),
        "name in capitals": (moved(CONFIG, "Adapter_Config.json"), {"missing_file"}),
        "name with a zero width space": (moved(WEIGHTS, f"{WEIGHTS}\u200b"), {"missing_file"}),
        "config of 1 GB": (sparse(CONFIG, 1 << 30), {"file_too_large"}),
        "weights of 1 TB": (sparse(WEIGHTS, 1 << 40), {"too_large"}),
        "template of 1 GB": (sparse("chat_template.jinja", 1 << 30), {"file_too_large"}),
    }


NO_WORD = "<no word of any model>"


def _tokenizers(base: BaseSpec) -> dict[str, tuple[Spoil, set[str]]]:
    vocab = base.tokens or {f"t{i}": i for i in range(base.vocab_size)}
    size = max(vocab.values()) + 1
    # A token without a row, where it is known what the base's tokenizer knows.
    added = {"added_tokens"} if base.tokens is None else {"resized_embeddings"}
    more = json.dumps({"model": {"vocab": vocab | {NO_WORD: size}}})
    listed = json.dumps(
        {"model": {"vocab": vocab}, "added_tokens": [{"id": size, "content": NO_WORD}]}
    )
    decoder = json.dumps({"added_tokens_decoder": {str(size): {"content": NO_WORD}}})
    bad: dict[str, tuple[str, str | bytes]] = {
        "text": ("tokenizer.json", "x"),
        "deep": ("tokenizer.json", '{"model":' + "[" * 99_999),
        "a bomb of lists": ("tokenizer.json", '{"model":{"vocab":[' + "[]," * 1_000_001 + "[]]}}"),
        "of numbers": ("tokenizer.json", '{"model":{"vocab":[' + "1," * 9999 + "1]}}"),
        "ids are text": ("tokenizer.json", '{"model":{"vocab":{"a":"b"}}}'),
        "config is a bomb of lists": ("tokenizer_config.json", '{"a":[' + "[]," * 500_000 + "[]]}"),
        "config is a list": ("tokenizer_config.json", "[]"),
        "config has a key twice": ("tokenizer_config.json", '{"a":1,"a":2}'),
        "added tokens deep": ("added_tokens.json", '{"a":' * 100 + "1" + "}" * 100),
    }
    templates: dict[str, tuple[str, str | bytes]] = {
        "template is not utf-8": ("chat_template.jinja", b"\xff\xfe"),
        "template is a number": ("tokenizer_config.json", '{"chat_template": 3}'),
        "template is an object": ("tokenizer_config.json", '{"chat_template": {"a": "b"}}'),
        "template of 200 KB": (
            "tokenizer_config.json",
            json.dumps({"chat_template": "x" * 200_000}),
        ),
    }
    ends = {
        "ends are a bomb of lists": '{"eos_token_id":[' + "[]," * 300_000 + "[]]}",
        "ends are deep": '{"eos_token_id":' + "[" * 99_999,
        "ends are text": '{"eos_token_id": "2"}',
        "an end below all ids": '{"eos_token_id": -1}',
        "an end above all ids": json.dumps({"eos_token_id": [1, 10**30]}),
        "ends are a list": "[2]",
    }
    generation = "generation_config.json"
    return {
        **{n: (file(generation, text), {"bad_generation_config"}) for n, text in ends.items()},
        "generation config of 1 GB": (sparse(generation, 1 << 30), {"file_too_large"}),
        **{name: (file(*written), {"bad_tokenizer_file"}) for name, written in bad.items()},
        **{name: (file(*written), {"bad_chat_template"}) for name, written in templates.items()},
        "added_tokens.json": (
            file("added_tokens.json", json.dumps({NO_WORD: size})),
            added,
        ),
        "larger": (file("tokenizer.json", more), {"added_tokens"}),
        "with added": (file("tokenizer.json", listed), added),
        "an id of 30 digits": (
            file("tokenizer.json", json.dumps({"model": {"vocab": vocab | {NO_WORD: 10**30}}})),
            {"added_tokens"},
        ),
        "added in the config": (file("tokenizer_config.json", decoder), added),
        "template is huge": (file("chat_template.jinja", "x" * (1 << 19)), {"file_too_large"}),
    }
