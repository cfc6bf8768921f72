"""Adapter folders that must be refused, each with the codes it must be refused with."""

import json
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters.base import BaseSpec
from tests.adapter_folders import (
    adapter_config,
    encode,
    lora_tensors,
    raw_safetensors,
    safetensors_bytes,
    small_base,
    write_config,
)

BASE = small_base()
WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
FIRST_B = FIRST.replace("lora_A", "lora_B")
PREFIX = "base_model.model."

Spoil = Callable[[Path], None]
Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Exploding:
    """Unpickling it would write a file: nothing may."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("/tmp/loraplex-was-unpickled",))


def config(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "adapter_config.json"
        write_config(folder, json.loads(path.read_text()) | changes)

    return spoil


def file(name: str, data: bytes | str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return spoil


def tensors(change: Callable[[Tensors], Tensors]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(safetensors_bytes(change(lora_tensors(BASE))))

    return spoil


def header(change: Callable[[dict[str, Any]], dict[str, Any]], extra: bytes = b"") -> Spoil:
    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        changed = change(json.loads(data[8 : 8 + size]))
        (folder / WEIGHTS).write_bytes(
            raw_safetensors(json.dumps(changed).encode(), data[8 + size :] + extra)
        )

    return spoil


def weights_bytes(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))

    return spoil


def value(number: float) -> Spoil:
    def change(found: Tensors) -> Tensors:
        found[FIRST][1, 1] = number
        return found

    return tensors(change)


def renamed(old: str, new: str) -> Spoil:
    return tensors(lambda found: {new if name == old else name: t for name, t in found.items()})


def extra(name: str, *shape: int) -> Spoil:
    return tensors(lambda found: found | {name: np.ones(shape, np.float32)})


def without(*parts: str) -> Spoil:
    return tensors(
        lambda found: {n: t for n, t in found.items() if not any(part in n for part in parts)}
    )


def fifo(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


def directory(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def link(name: str, target: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return spoil


def pickled(*names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for name in names:
            (folder / name).write_bytes(pickle.dumps(Exploding()))

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(folder: Path) -> None:
        for one in spoils:
            one(folder)

    return spoil


def dtype(name: str) -> Spoil:
    """Claims another dtype of the same width for the first tensor."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        found[FIRST] |= {"dtype": name}
        return found

    return header(change)


def _moved(by: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        start, end = found[FIRST]["data_offsets"]
        found[FIRST]["data_offsets"] = [start + by, end + by]
        return found

    return change


def _bf16_nan(folder: Path) -> None:
    made = lora_tensors(BASE)
    made[FIRST][0, 0] = np.nan
    data = safetensors_bytes(made, "BF16")
    assert encode(np.array([np.nan], np.float32), "BF16") in data
    (folder / WEIGHTS).write_bytes(data)


def cases() -> Mapping[str, tuple[Spoil, set[str]]]:
    """Name -> how a good folder is spoiled, and the violations it must have, at least."""
    return _config_lies() | _tensor_lies() | _format_lies() | _file_tricks() | _tokenizers()


def _config_lies() -> dict[str, tuple[Spoil, set[str]]]:
    return {
        "rank of config above tensors": (config(r=16), {"rank_mismatch"}),
        "rank of config below tensors": (config(r=4), {"rank_mismatch"}),
        "rank 0": (config(r=0), {"bad_value"}),
        "rank huge": (config(r=60_000), {"rank_too_large", "rank_mismatch"}),
        "rank_pattern lies": (config(rank_pattern={"q_proj": 2}), {"rank_mismatch"}),
        "alpha zero": (config(lora_alpha=0), {"bad_value"}),
        "alpha huge": (config(lora_alpha=1e38), {"bad_value"}),
        "alpha text": (config(lora_alpha="8"), {"bad_value"}),
        "wrong base": (config(base_model_name_or_path="other/model"), {"wrong_base"}),
        "unknown target": (
            config(target_modules=["c_attn"]),
            {"unknown_target", "untargeted_tensor"},
        ),
        "target narrowed": (config(target_modules=["q_proj"]), {"untargeted_tensor"}),
        "layers narrowed": (config(layers_to_transform=[0]), {"untargeted_tensor"}),
        "excluded": (config(exclude_modules=["v_proj"]), {"untargeted_tensor"}),
        "dora": (config(use_dora=True), {"unsupported_feature"}),
        "bias": (config(bias="all"), {"unsupported_feature"}),
        "modules_to_save": (config(modules_to_save=["lm_head"]), {"unsupported_feature"}),
        "pissa": (config(init_lora_weights="pissa"), {"unsupported_feature"}),
        "ia3": (config(peft_type="IA3"), {"unsupported_peft_type"}),
        "unknown key": (config(lora_gating=True), {"unknown_key"}),
        "regex bomb": (config(target_modules="(((((a{99}){99}){99}){99}){99})"), {"bad_pattern"}),
        "regex lookahead": (config(target_modules="(?=.*q_proj).*"), {"bad_pattern"}),
        "many lies": (
            config(use_dora=True, base_model_name_or_path="x/y", r=9),
            {"unsupported_feature", "wrong_base", "rank_mismatch"},
        ),
        "config not json": (file("adapter_config.json", "r: 8"), {"bad_config"}),
        "config empty": (file("adapter_config.json", ""), {"bad_config"}),
        "config list": (file("adapter_config.json", "[1]"), {"bad_config"}),
        "config nan": (file("adapter_config.json", '{"lora_alpha": NaN}'), {"bad_config"}),
        "config twice r": (file("adapter_config.json", '{"r": 8, "r": 4}'), {"bad_config"}),
        "config deep": (file("adapter_config.json", '{"a":' * 9999), {"bad_config"}),
        "config huge": (file("adapter_config.json", " " * (2 << 20)), {"file_too_large"}),
        "config utf16": (file("adapter_config.json", '{"r": 8}'.encode("utf-16")), {"bad_config"}),
    }


def _tensor_lies() -> dict[str, tuple[Spoil, set[str]]]:
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    return {
        "extra tensor": (extra("other.weight", 2, 2), {"unknown_tensor"}),
        "dora magnitude": (extra(f"{q}.lora_magnitude_vector", 32), {"unknown_tensor"}),
        "lora bias": (extra(f"{q}.lora_B.bias", 32), {"unknown_tensor"}),
        "full module": (extra(f"{q}.weight", 32, 32), {"unknown_tensor"}),
        "head copy": (extra(f"{PREFIX}lm_head.weight", 64, 32), {"base_weights_included"}),
        "head resized": (extra(f"{PREFIX}lm_head.weight", 66, 32), {"resized_embeddings"}),
        "embedding copy": (
            extra(f"{PREFIX}model.embed_tokens.base_layer.weight", 64, 32),
            {"base_weights_included"},
        ),
        "classifier": (extra(f"{PREFIX}score.weight", 2, 32), {"unknown_tensor"}),
        "unknown module": (renamed(FIRST, FIRST.replace("q_proj", "w_proj")), {"unknown_module"}),
        "module elsewhere": (renamed(FIRST, FIRST.replace("self_attn", "mlp")), {"unknown_module"}),
        "no prefix": (
            renamed(FIRST, FIRST.removeprefix(PREFIX)),
            {"unknown_tensor", "lone_tensor"},
        ),
        "bare model": (renamed(FIRST, FIRST.replace("model.model.", "model.")), {"unknown_module"}),
        "other adapter name": (
            renamed(FIRST, FIRST.replace("lora_A", "lora_A.custom")),
            {"unknown_tensor", "lone_tensor"},
        ),
        "layer beyond": (
            renamed(FIRST, FIRST.replace("layers.0", "layers.2")),
            {"layer_out_of_range"},
        ),
        "layer 007": (renamed(FIRST, FIRST.replace("layers.0", "layers.00")), {"unknown_module"}),
        "stored twice": (
            tensors(lambda t: t | {FIRST.replace("lora_A", "lora_A.default"): t[FIRST]}),
            {"duplicate_tensor"},
        ),
        "lone A": (without("0.self_attn.q_proj.lora_B"), {"lone_tensor"}),
        "lone B": (without("0.self_attn.q_proj.lora_A"), {"lone_tensor"}),
        "no tensors": (tensors(lambda t: {}), {"no_tensors"}),
        "transposed": (tensors(lambda t: t | {FIRST: t[FIRST].T.copy()}), {"shape_mismatch"}),
        "other hidden size": (
            tensors(lambda t: t | {FIRST: np.ones((8, 33), np.float32)}),
            {"shape_mismatch"},
        ),
        "one dimension": (tensors(lambda t: t | {FIRST: t[FIRST].ravel()}), {"shape_mismatch"}),
        "three dimensions": (tensors(lambda t: t | {FIRST: t[FIRST][None]}), {"shape_mismatch"}),
        "ranks of A and B differ": (
            tensors(lambda t: t | {FIRST_B: np.ones((32, 7), np.float32)}),
            {"rank_mismatch"},
        ),
        "embedding as linear": (
            both(
                config(target_modules=["q_proj", "v_proj", "embed_tokens"]),
                extra(f"{PREFIX}model.embed_tokens.lora_A.weight", 8, 64),
            ),
            {"misplaced_tensor"},
        ),
        "linear as embedding": (extra(f"{q}.lora_embedding_A", 8, 32), {"misplaced_tensor"}),
        "linear without weight": (extra(f"{q}.lora_A", 8, 32), {"misplaced_tensor"}),
        "nan": (value(float("nan")), {"not_finite"}),
        "infinity": (value(float("inf")), {"not_finite"}),
        "minus infinity": (value(float("-inf")), {"not_finite"}),
        "bf16 nan": (_bf16_nan, {"not_finite"}),
        "integer weights": (dtype("I32"), {"unsupported_dtype"}),
        "unsigned weights": (dtype("U32"), {"unsupported_dtype"}),
    }


def _format_lies() -> dict[str, tuple[Spoil, set[str]]]:
    return {
        "empty file": (weights_bytes(lambda d: b""), {"truncated"}),
        "seven bytes": (weights_bytes(lambda d: d[:7]), {"truncated"}),
        "header only": (weights_bytes(lambda d: d[:100]), {"truncated"}),
        "last byte lost": (weights_bytes(lambda d: d[:-1]), {"truncated"}),
        "byte appended": (weights_bytes(lambda d: d + b"\0"), {"trailing_bytes"}),
        "zip appended": (weights_bytes(lambda d: d + b"PK\x03\x04" * 50), {"trailing_bytes"}),
        "header 2**63": (weights_bytes(lambda d: b"\xff" * 8 + d[8:]), {"header_too_large"}),
        "header 100 MB": (
            weights_bytes(lambda d: struct.pack("<Q", 100 << 20) + d[8:]),
            {"header_too_large"},
        ),
        "html": (weights_bytes(lambda d: b"<!DOCTYPE html>" + b" " * 99), {"header_too_large"}),
        "lfs pointer": (
            weights_bytes(lambda d: b"version https://git-lfs.github.com/spec/v1\n"),
            {"header_too_large"},
        ),
        "gap": (header(_moved(4), b"\0" * 4), {"gap"}),
        "overlap": (header(_moved(-4)), {"bad_offsets"}),
        "million tensors": (
            header(lambda h: {f"t{i}": {} for i in range(30_000)}),
            {"too_many_tensors"},
        ),
        "unknown dtype": (dtype("Q4_K"), {"unknown_dtype"}),
        "dtype of other width": (dtype("F16"), {"span_mismatch"}),
        "metadata of numbers": (header(lambda h: h | {"__metadata__": {"a": 1}}), {"bad_metadata"}),
        "duplicate tensor": (
            weights_bytes(lambda d: raw_safetensors(b'{"a": {}, "a": {}}', b"")),
            {"duplicate_key"},
        ),
        "name of 1 MB": (header(lambda h: h | {"x" * (1 << 20): {}}), {"bad_tensor_name"}),
        "name with newline": (header(lambda h: h | {"x\n": {}}), {"bad_tensor_name"}),
        "surrogate name": (header(lambda h: h | {"\ud800": {}}), {"bad_tensor_name"}),
    }


def _file_tricks() -> dict[str, tuple[Spoil, set[str]]]:
    return {
        "no config": (lambda f: (f / "adapter_config.json").unlink(), {"missing_file"}),
        "no weights": (lambda f: (f / WEIGHTS).unlink(), {"missing_file"}),
        "nothing": (
            both(
                lambda f: (f / "adapter_config.json").unlink(),
                lambda f: (f / WEIGHTS).unlink(),
            ),
            {"missing_file"},
        ),
        "pickle .bin": (pickled("adapter_model.bin"), {"unsafe_format"}),
        "pickle .pt": (pickled("adapter_model.pt"), {"unsafe_format"}),
        "pickle .BIN": (pickled("ADAPTER_MODEL.BIN"), {"unsafe_format"}),
        "pickle as safetensors": (
            file(WEIGHTS, pickle.dumps(Exploding())),
            {"header_too_large"},
        ),
        "weights are a fifo": (fifo(WEIGHTS), {"not_a_file"}),
        "config is a fifo": (fifo("adapter_config.json"), {"not_a_file"}),
        "weights are a folder": (directory(WEIGHTS), {"not_a_file"}),
        "config is a folder": (directory("adapter_config.json"), {"not_a_file"}),
        "weights are a device": (link(WEIGHTS, "/dev/zero"), {"not_a_file"}),
        "config is a device": (link("adapter_config.json", "/dev/null"), {"not_a_file"}),
        "weights link to themselves": (link(WEIGHTS, WEIGHTS), {"not_a_file"}),
        "weights link nowhere": (link(WEIGHTS, "gone"), {"not_a_file"}),
    }


def _tokenizers() -> dict[str, tuple[Spoil, set[str]]]:
    vocab = {f"t{i}": i for i in range(BASE.vocab_size)}
    more = json.dumps({"model": {"vocab": vocab | {"new": BASE.vocab_size}}})
    listed = json.dumps({"model": {"vocab": vocab}, "added_tokens": [{"id": 64, "content": "x"}]})
    decoder = json.dumps({"added_tokens_decoder": {"64": {"content": "<pad>"}}})
    return {
        "added_tokens.json": (file("added_tokens.json", '{"<new>": 64}'), {"added_tokens"}),
        "larger tokenizer.json": (file("tokenizer.json", more), {"added_tokens"}),
        "tokenizer.json with added": (file("tokenizer.json", listed), {"added_tokens"}),
        "added in the config": (file("tokenizer_config.json", decoder), {"added_tokens"}),
        "tokenizer.json is text": (file("tokenizer.json", "x"), {"bad_tokenizer_file"}),
        "tokenizer.json is deep": (
            file("tokenizer.json", '{"model":' + "[" * 99_999),
            {"bad_tokenizer_file"},
        ),
        "tokenizer config is a list": (file("tokenizer_config.json", "[]"), {"bad_tokenizer_file"}),
        "template is not utf-8": (file("chat_template.jinja", b"\xff\xfe"), {"bad_chat_template"}),
        "template is a number": (
            file("tokenizer_config.json", '{"chat_template": 3}'),
            {"bad_chat_template"},
        ),
        "template is huge": (file("chat_template.jinja", "x" * (1 << 19)), {"file_too_large"}),
    }


def write_good(folder: Path, base: BaseSpec = BASE) -> Path:
    """The folder that the cases spoil."""
    folder.mkdir(parents=True)
    write_config(folder, adapter_config(base, 8, ["q_proj", "v_proj"]))
    (folder / WEIGHTS).write_bytes(safetensors_bytes(lora_tensors(base)))
    return folder
