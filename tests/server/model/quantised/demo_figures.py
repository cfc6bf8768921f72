"""What quantising the demo model costs: `python -m tests.server.model.quantised.demo_figures`.

Prints JSON: for each scheme the base's perplexity over messages nobody trained on, and the share of
right answers of each adapter. The base's matrices have the values that the scheme stands for, as
the server reads them; adapters are computed in float32 by PEFT.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.launcher.demo import adapter_paths, model_path
from tests.server.model.quantised.checkpoints import matrices
from tests.server.model.quantised.formats import (
    BY_TOKEN,
    FP8,
    INT4_128,
    INT8,
    INT_BY_TOKEN,
    Format,
    awq,
    compressed,
    four_bits,
    fp8,
    gptq,
)
from tools.demo import calls
from tools.demo.corpus import SEED, held_out_messages
from tools.demo.evaluate import FORMS, EvaluationSetup, measure

SCHEMES: dict[str, Format | None] = {
    "bfloat16": None,
    "FP8, a scale for each output": compressed("float-quantized", FP8, BY_TOKEN),
    "FP8 in blocks of 128 x 128": fp8([128, 128]),
    "int8, a scale for each output": compressed("int-quantized", INT8, INT_BY_TOKEN),
    "int4 in groups of 128": compressed("pack-quantized", INT4_128),
    "int4 in groups of 128, with zeros (AWQ's form)": awq(128),
    "int8 in groups of 128 (GPTQ's form)": gptq(8, 128),
    "NF4, double quantisation": four_bits("nf4", nested=True),
}


def quantised(form: Format | None, folder: Path) -> Path:
    """The demo model with the values that the form stands for."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    if form is not None:
        with torch.no_grad():
            for _, module in matrices(model):
                module.weight.copy_(form.pack(module.weight.detach().clone()).weight)
    model.save_pretrained(folder)
    for path in model_path().glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    return folder


@torch.inference_mode()
def perplexity(folder: Path, texts: list[str]) -> float:
    """Of the texts' tokens behind the first."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        total -= float(scores.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    return math.exp(total / count)


def figures(count: int) -> Iterator[dict[str, Any]]:
    messages = list(held_out_messages(SEED, count))
    cases = {kind: list(calls.held_out_cases(kind, count, SEED)) for kind in calls.KINDS}
    for scheme, form in SCHEMES.items():
        with tempfile.TemporaryDirectory() as made:
            folder = quantised(form, Path(made))
            report = measure(EvaluationSetup(folder, adapter_paths(), "cpu", messages, cases, 50))
            right = {
                name: min(scores[each] for each in FORMS)
                for name, scores in report["tasks"].items()
            }
            right |= {f"calls, {kind}": found["share"] for kind, found in report["calls"].items()}
            yield {
                "scheme": scheme,
                "perplexity": round(perplexity(folder, [m.text for m in messages]), 3),
                "right": {name: round(share, 4) for name, share in right.items()},
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100)
    count = parser.parse_args().messages
    rows = []
    for row in figures(count):
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    print(json.dumps({"messages": count, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
