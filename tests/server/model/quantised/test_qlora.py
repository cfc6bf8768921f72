"""A QLoRA adapter on the base that it was trained on: the logits that its trainer computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.server.model.driver import Driver, Stream, by_token, generate
from tests.server.model.families.parity import GREEDY, TOLERANCE, prompt
from tests.server.model.families.variants import SEVEN
from tests.server.model.hub_models import VOCAB, add_adapter, make_model, reference_logprobs
from tests.server.model.quantised.checkpoints import change_config, save_quantised
from tests.server.model.quantised.formats import FORMATS
from tests.server.model.slabs import pack

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("form", "use_dora"),
    [("nf4", False), ("nf4-nested", False), ("fp4", False), ("nf4-nested", True)],
)
def test_as_the_trainer(form: str, use_dora: bool, tmp_path: Path) -> None:
    """By transformers, bitsandbytes and PEFT on the same checkpoint; the mode is that of training,
    since outside of it bitsandbytes computes in bfloat16 on a CPU."""
    config = LoraConfig(r=8, lora_alpha=16, target_modules=SEVEN, use_dora=use_dora)
    base = make_model("llama3", intermediate_size=128)
    save_quantised(base, tmp_path, FORMATS[form])
    settings = {"bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": ["lm_head"]}
    change_config(tmp_path, quantization_config={**FORMATS[form].config, **settings})
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    layout, slab = pack(add_adapter(base, "one", config, 1), "one")
    trainer = add_adapter(theirs, "one", config, 1)
    trainer.train()
    driver = Driver(tmp_path)
    assert driver.load(0, layout, slab, 0).error is None
    streams = [
        Stream(driver, row, prompt(6 + 5 * row, row), slot=row - 1, sampling=GREEDY)
        for row in range(2)
    ]
    generate(driver, streams, 5, 4)
    for name, stream in zip((None, "one"), streams, strict=True):
        expected = reference_logprobs(trainer, name, stream.tokens)
        for place, found in enumerate(stream.logprobs, stream.prompt_len - 1):
            got = by_token(found, VOCAB)
            assert (got - expected[place]).abs().max().item() < 2 * TOLERANCE
    driver.close()
