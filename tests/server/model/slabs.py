"""An adapter's way from PEFT's memory to a slab's bytes: saved, validated, laid out, packed."""

import json
import tempfile
from pathlib import Path

import msgspec
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.errors import Findings
from loraplex.adapters.manifest import SlabDtype, SlabLayout
from loraplex.adapters.peft.config import parse_config
from loraplex.adapters.peft.validate import AdapterLimits, validate
from loraplex.adapters.safetensors.header import header_size, parse_header
from loraplex.adapters.slab.layout import make_layout
from loraplex.server.model.families.registry import read_model
from loraplex.server.model.spec.base_spec import base_spec
from tests.slab_files import read_payload, write_slab

TOKENS = 90


def pack(
    model: PeftModel,
    adapter: str,
    *,
    extent_bytes: int = 4096,
    dtype: SlabDtype = "float32",
    stored: torch.dtype | None = None,
    shards: int = 1,
    resized_from: PreTrainedModel | None = None,
    saves_tables: bool = True,
) -> tuple[SlabLayout, bytes]:
    """The layout and the payload, its runs one after the other.

    stored: what the weights are rounded to in the adapter's file; None = as the model has them.
    shards: devices that share the base. resized_from: the base, where the model has more or fewer
    rows; its tokenizer knows TOKENS ids. saves_tables: whether the file then has whole tables.
    """
    base = msgspec.structs.replace(
        spec_of(resized_from or model, is_resized=resized_from is not None), shards=shards
    )
    with tempfile.TemporaryDirectory() as name:
        tables = resized_from is not None and saves_tables
        model.save_pretrained(name, selected_adapters=[adapter], save_embedding_layers=tables)
        folder = Path(name) / adapter
        weights = folder / "adapter_model.safetensors"
        if stored is not None:
            tensors_stored = {n: t.to(stored) for n, t in load_file(weights).items()}
            save_file(tensors_stored, weights)
        return pack_folder(folder, base, extent_bytes=extent_bytes, dtype=dtype)


def spec_of(model: PeftModel | PreTrainedModel, *, is_resized: bool = False) -> BaseSpec:
    config = read_model(json.loads(model.config.to_json_string()))
    known = {f"t{i}": i for i in range(TOKENS)} if is_resized else None
    return base_spec(config, "0" * 64, ("base",), tokens=known)


def pack_folder(
    folder: Path,
    base: BaseSpec,
    *,
    extent_bytes: int = 4096,
    dtype: SlabDtype = "float32",
    text_part_only: bool = False,
) -> tuple[SlabLayout, bytes]:
    """As `pack`, of an adapter's folder, which may name any base."""
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    size = header_size(data[:8], len(data))
    findings = Findings()
    peft = parse_config((folder / "adapter_config.json").read_bytes(), findings)
    findings.raise_if_any()
    assert peft is not None
    tensors = parse_header(data[8 : 8 + size], len(data))
    limits = AdapterLimits(allow_other_base=True, text_part_only=text_part_only)
    lora = validate(peft, tensors, base, limits, findings)
    assert lora is not None
    findings.raise_if_any()
    layout = make_layout(lora, base, folder.name.ljust(64, "0"), dtype, extent_bytes)
    with tempfile.TemporaryDirectory() as name:
        slab = Path(name) / "slab"
        write_slab(weights, lora, base, layout, slab)
        return layout, read_payload(slab)
