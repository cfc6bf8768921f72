"""A small base whose layers keep states, adapters for it, and their right tokens: greedy ones of
transformers and PEFT."""

import random
import shutil
import uuid
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from loraplex.launcher.demo import model_path
from tests.chaos.load import Certifier, Order
from tests.chaos.processes import Served
from tests.server.model.adapter_zoo import with_zoo, zoo_of
from tests.server.model.driver import Driver, Stream, generate
from tests.server.model.families.parity import GREEDY
from tests.server.model.families.variants import VARIANTS
from tests.server.model.hub_models import make_model, reference_logprobs, save_model
from tests.server.model.slabs import pack

# Rows of parity's table: a Gated DeltaNet, one whose products lie by key head beside experts, a
# Mamba-2 without rotation, short convolutions, and Mamba-2 alone.
ROWS = ("qwen3.5", "qwen3-next", "nemotron-h", "lfm2", "mamba2")
ADAPTERS = ("rank3_rslora", "rank16")
# Each prompt has one of a few beginnings, so that it goes on from snapshots.
PROMPTS, BEGINNINGS = 24, 3
LEAST_TOKENS, MOST_TOKENS = 12, 70
# Closer logits may change places where a batch adds up in another order.
LEAST_GAP = 2e-3
WORDS = ("river", "stone", "lamp", "cloud", "seed", "glass", "winter", "road")
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--max-draft", "4", "--max-running", "6"),
    *("--snapshot-memory", "4MiB"),
)


class StateBase(Certifier):
    """The base and its adapters lie in a folder. Orders are of prompts whose tokens are known. row:
    of parity's table."""

    def __init__(self, folder: Path, row: str = ROWS[0]) -> None:
        self.row = row
        base, demo = make_model(row, vocab_size=2048, max_position_embeddings=512), model_path()
        model = save_model(base, folder / "model")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / name, model / name)
        zoo = zoo_of(VARIANTS[row])
        self._oracle = with_zoo(base, {name: zoo[name] for name in ADAPTERS})
        self._oracle.save_pretrained(folder / "adapters", selected_adapters=list(ADAPTERS))
        self._ends = {base.config.eos_token_id}
        super().__init__(Served(model, folder / "adapters", ADAPTERS, OPTIONS))
        dice = random.Random(5)
        begins = [" ".join(dice.choices(WORDS, k=40)) for _ in range(BEGINNINGS)]
        ends = [" ".join(dice.choices(WORDS, k=9)) for _ in range(PROMPTS)]
        prompts = [f"{dice.choice(begins)} {end}" for end in ends]
        self.answers = [*self._answered(prompts)]

    def _answered(self, prompts: list[str]) -> Iterator[tuple[str | None, str, list[int]]]:
        """Prompts, each of the base or an adapter, and their tokens: an executor's, as long as they
        are plainly the most likely ones."""
        driver = Driver(self.served.model)
        slots = {name: number for number, name in enumerate(ADAPTERS)}
        extent = 0
        for name, slot in slots.items():
            layout, slab = pack(self._oracle, name)
            assert driver.load(slot, layout, slab, extent).error is None
            extent += sum(layout.runs)
        for number, prompt in enumerate(prompts):
            adapter = (None, *ADAPTERS)[number % 3]
            ids, slot = self.tokenizer.encode(prompt).ids, slots.get(adapter or "", -1)
            stream = Stream(driver, 0, ids, slot=slot, sampling=GREEDY)
            generate(driver, [stream], MOST_TOKENS, 64)
            tokens, rows = stream.output, reference_logprobs(self._oracle, adapter, stream.tokens)
            best = rows[len(ids) - 1 :].topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            plain = (
                gap > LEAST_GAP and token not in self._ends
                for token, gap in zip(tokens, gaps, strict=False)
            )
            count = sum(takewhile(bool, plain))
            assert tokens[:count] == best.indices[:count, 0].tolist()
            if count >= LEAST_TOKENS:
                yield adapter, prompt, tokens[:count]
            stream.free()
        driver.close()

    def order(self, dice: random.Random, min_tokens: int, max_tokens: int) -> Order:
        adapter, prompt, tokens = dice.choice(self.answers)
        count = dice.randint(min_tokens, max_tokens)
        expected = tokens[:count]
        key = f"{uuid.UUID(int=dice.getrandbits(128))}"
        return Order(adapter, prompt, lambda: expected, len(expected), key, dice.uniform(0.5, 1.0))
