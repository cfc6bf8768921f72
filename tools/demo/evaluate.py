"""Scores the shipped adapters on messages nobody trained on.

To run: `python -m tools.demo.evaluate`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.adapters.common import extras
from loraplex.launcher.demo import adapter_paths, model_path
from tools.demo import calls, tasks
from tools.demo.corpus import SEED, LabelledMessage, held_out_messages

FORMS = ("raw", "chat")
MAX_ANSWER = 96


@dataclass(frozen=True)
class EvaluationSetup:
    """Files to measure, and the way to measure them."""

    model: Path
    adapters: dict[str, Path]
    device: str
    messages: list[LabelledMessage]
    cases: dict[str, list[calls.Case]]
    batch: int


def _prompts(tokenizer: Any, messages: list[LabelledMessage], form: str) -> list[list[int]]:
    if form == "raw":
        return [list(tokenizer(message.text)["input_ids"]) for message in messages]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message.text}], tokenize=False, add_generation_prompt=True
        )
        for message in messages
    ]
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def answers(model: Any, tokenizer: Any, prompts: list[list[int]], batch: int) -> list[str]:
    """Greedy answers, in the prompts' order."""
    import torch

    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = max(len(prompts[at]) for at in chosen)
        pads = [width - len(prompts[at]) for at in chosen]
        rows = [
            [tokenizer.pad_token_id] * pad + prompts[at]
            for pad, at in zip(pads, chosen, strict=True)
        ]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        made = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=MAX_ANSWER,
            do_sample=False,
        )
        for at, row in zip(chosen, made[:, width:], strict=True):
            texts[at] = tokenizer.decode(row, skip_special_tokens=True)
    return texts


def measure(setup: EvaluationSetup) -> dict[str, Any]:
    """The share of right answers per task and prompt form, with the adapter and without."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    base = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32).eval()
    base.to(setup.device)
    prompts = {form: _prompts(tokenizer, setup.messages, form) for form in FORMS}
    alone = {form: answers(base, tokenizer, prompts[form], setup.batch) for form in FORMS}
    report: dict[str, Any] = {"base": {form: alone[form][:3] for form in FORMS}, "tasks": {}}
    model: Any = None
    for name, path in setup.adapters.items():
        if model is None:
            model = PeftModel.from_pretrained(base, str(path), adapter_name=name)
        else:
            model.load_adapter(str(path), adapter_name=name)
        model.set_adapter(name)
        model.eval()
        if name == calls.TASK:
            report["calls"] = _measure_calls(setup, model, tokenizer)
            continue
        scores: dict[str, Any] = {}
        for form in FORMS:
            made = answers(model, tokenizer, prompts[form], setup.batch)
            scores[form] = _share(name, made, setup.messages)
            scores[f"base_{form}"] = _share(name, alone[form], setup.messages)
            scores[f"wrong_{form}"] = _wrong(name, made, setup.messages)
        report["tasks"][name] = scores
    return report


def _measure_calls(setup: EvaluationSetup, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The share of right answers of the adapter that calls tools, by kind of case."""
    shares: dict[str, Any] = {}
    for kind, cases in setup.cases.items():
        texts = [calls.prompt(case) for case in cases]
        prompts = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        made = answers(model, tokenizer, prompts, setup.batch)
        wrong = [
            {"prompt": text, "wanted": case.answer, "answered": answer}
            for text, case, answer in zip(texts, cases, made, strict=True)
            if not case.is_right(answer)
        ]
        shares[kind] = {"share": 1 - len(wrong) / len(cases), "wrong": wrong[:5]}
    return shares


def _share(task: str, made: list[str], messages: list[LabelledMessage]) -> float:
    right = sum(tasks.is_right(task, a, m.facts) for a, m in zip(made, messages, strict=True))
    return right / len(messages)


def _wrong(task: str, made: list[str], messages: list[LabelledMessage]) -> list[dict[str, str]]:
    """The first few mistakes, to learn from."""
    wrong = [
        {"message": m.text, "wanted": tasks.ANSWERS[task](m.facts), "answered": a}
        for a, m in zip(made, messages, strict=True)
        if not tasks.is_right(task, a, m.facts)
    ]
    return wrong[:5]


def _print_table(report: dict[str, Any], count: int, spent: float) -> None:
    print(f"{count} held-out messages, right answers in percent, {spent:.0f} s")
    print(f"{'adapter':<12}{'raw':>8}{'chat':>8}{'base raw':>10}{'base chat':>11}")
    for name, scores in report["tasks"].items():
        cells = [100 * scores[key] for key in ("raw", "chat", "base_raw", "base_chat")]
        print(f"{name:<12}{cells[0]:>8.1f}{cells[1]:>8.1f}{cells[2]:>10.1f}{cells[3]:>11.1f}")
    for kind, scores in report.get("calls", {}).items():
        print(f"{calls.TASK}, {kind}: {100 * scores['share']:.1f}")


def main() -> None:
    """Measures the files in a folder laid out as `launcher/demo`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="default: the shipped files")
    parser.add_argument("--adapters", default=None, help="names with commas; default: all")
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print the report, mistakes included")
    args = parser.parse_args()
    adapters = adapter_paths(args.folder)
    if args.adapters:
        adapters = {name: adapters[name] for name in args.adapters.split(",")}
    setup = EvaluationSetup(
        model=args.folder / "model" if args.folder else model_path(),
        adapters=adapters,
        device=args.device,
        messages=list(held_out_messages(args.seed, args.messages)),
        cases={
            kind: list(calls.held_out_cases(kind, args.messages, args.seed)) for kind in calls.KINDS
        },
        batch=args.batch,
    )
    started = time.monotonic()
    try:
        report = measure(setup)
    except ModuleNotFoundError as error:
        parser.exit(1, f"loraplex: {extras.sentence(error, 'dev') or error}\n")
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        _print_table(report, args.messages, time.monotonic() - started)


if __name__ == "__main__":
    main()
