"""Adapters as PEFT saves them by itself, judged and packed as a worker does."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from peft import LoraConfig, PeftModel

from loraplex.adapters.base import BaseSpec
from loraplex.adapters.judge import judge_folder
from loraplex.adapters.manifest import SlabLayout
from loraplex.adapters.peft.validate import AdapterLimits
from loraplex.adapters.slab.layout import make_layout
from loraplex.server.model.card import read_base_spec
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY, assert_parity, prompt
from tests.server.model.hub_models import add_adapter, make_model
from tests.server.model.sharding.lockstep import ShardedDriver
from tests.slab_files import read_payload, write_slab

# Ids that the base's tokenizer knows: fewer than its tables have rows.
TOKENS = 90


class Judged(NamedTuple):
    oracle: PeftModel
    layout: SlabLayout
    slab: bytes


def spec_of_folder(base: Path, shards: int = 1) -> BaseSpec:
    tokens = {f"t{i}": i for i in range(TOKENS)}
    return msgspec.structs.replace(read_base_spec(base, ("base",)), shards=shards, tokens=tokens)


def judged(
    family: str, base: BaseSpec, folder: Path, seed: int, rows: int = 0, **options: Any
) -> Judged:
    """An adapter of a random model. rows: of its tables, where the training has resized them; 0 =
    it has not. options: of LoraConfig."""
    model = make_model(family)
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    oracle = add_adapter(model, "one", LoraConfig(**{"r": 4, "lora_alpha": 6, **options}), seed)
    names = ("embed_tokens", "wte", "lm_head") if rows else ()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            is_table = any(f".{table}." in name for table in names)
            if (parameter.requires_grad or is_table) and "lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    oracle.save_pretrained(folder, save_embedding_layers=bool(rows) or "auto")
    tensors = judge_folder(folder / "one", base, AdapterLimits(allow_other_base=True)).tensors
    layout = make_layout(tensors, base, str(seed).zfill(64), "float32", 4096)
    write_slab(folder / "one/adapter_model.safetensors", tensors, base, layout, folder / "slab")
    return Judged(oracle, layout, read_payload(folder / "slab"))


def assert_as_peft(
    family: str, base: Path, adapters: dict[str, dict[str, Any]], shards: int = 1
) -> None:
    """All in one batch with the base, twice: logprobs within 1e-4. adapters: options of `judged`,
    by name."""
    spec = spec_of_folder(base, shards)
    found = {
        name: judged(family, spec, base / name, 3 + i, **options)
        for i, (name, options) in enumerate(adapters.items())
    }
    driver = Driver(base) if shards == 1 else ShardedDriver(base, shards)
    for shift in (0, 1):
        slots = driver.load_all(found, shift, first=5 * shift)
        streams = {}
        for row, (name, slot) in enumerate(slots.items()):
            last = (adapters.get(name or "", {}).get("rows") or TOKENS) - 1
            ids = [last, *(token % TOKENS for token in prompt(9, row))]
            streams[name] = Stream(driver, row, ids, slot=slot, sampling=GREEDY)
        generate(driver, [*streams.values()], 4, 5)
        for name, stream in streams.items():
            if name is not None:
                assert_parity(found[name].oracle, "one", stream)
            stream.free()
    driver.close()
