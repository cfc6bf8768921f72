"""Adapters that end their answers by tokens of their own, beside others, in one batch."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.completion import Completion

from loraplex.launcher.demo import EXAMPLES, adapter_paths
from tests.e2e.serving import Serving

WHOLE = 40


@pytest.fixture(scope="module")
def plain(adapter_root: Path) -> Path:
    return shutil.copytree(min(adapter_paths().values()), adapter_root / "plain-end")


def ended_by(plain: Path, name: str, token_id: int) -> Path:
    """The same adapter, whose files name another end of its answers."""
    folder = shutil.copytree(plain, plain.parent / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token_id]}))
    return folder


def ids_of(answer: Any) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


async def generate(http: httpx.AsyncClient, adapter: Path, **more: Any) -> Any:
    parameters = {
        "adapter_id": f"local:{adapter}",
        "details": True,
        "max_new_tokens": WHOLE,
        **more,
    }
    answer = await http.post("/generate", json={"inputs": EXAMPLES[0], "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_adapter_ends_by_its_own_tokens(serving: Serving, plain: Path) -> None:
    """What the plain one writes tells what the others must, up to their ends."""
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as http:
        whole = ids_of(await generate(http, plain))
        firsts = [i for i in range(2, len(whole) - 1) if whole[i] not in whole[:i]]
        cuts = [firsts[0], firsts[len(firsts) // 2], firsts[-1]]
        assert len(set(cuts)) == 3
        own = [ended_by(plain, f"ends-{cut}", whole[cut]) for cut in cuts]
        folders = [plain, *own] * 4
        answers = await asyncio.gather(*(generate(http, folder) for folder in folders))
        for folder, answer in zip(folders, answers, strict=True):
            cut = len(whole) - 1 if folder == plain else cuts[own.index(folder)]
            assert ids_of(answer) == whole[: cut + 1]
            assert answer["details"]["generated_tokens"] == cut + 1
            if folder != plain:
                assert answer["details"]["finish_reason"] == "eos_token"
        on = await asyncio.gather(*(generate(http, f, ignore_eos_token=True) for f in own))
        assert all(ids_of(answer)[: len(whole) - 1] == whole[:-1] for answer in on)


async def test_it_is_the_models_own_end_for_openais_clients(serving: Serving, plain: Path) -> None:
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as http:
        whole = await generate(http, plain)
    ids, cut = ids_of(whole), 3
    folder = ended_by(plain, "ends-for-openai", ids[cut])
    client = AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0)
    first = ids.index(ids[cut])

    async def complete(**more: Any) -> Completion:
        made = await client.completions.create(
            model=f"local:{folder}",
            prompt=EXAMPLES[0],
            temperature=0,
            max_tokens=WHOLE,
            extra_body=more,
        )
        assert isinstance(made, Completion)
        return made

    made = await complete()
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.completion_tokens == first + 1
    assert whole["generated_text"].startswith(made.choices[0].text)
    held_back = await complete(min_tokens=first + 4)
    assert held_back.usage is not None
    assert held_back.usage.completion_tokens >= first + 4
    several = await complete(n=3)
    assert {choice.text for choice in several.choices} == {made.choices[0].text}
    streamed = await client.completions.create(
        model=f"local:{folder}", prompt=EXAMPLES[0], temperature=0, max_tokens=WHOLE, stream=True
    )
    parts = [part.choices[0] async for part in streamed]
    assert "".join(part.text for part in parts) == made.choices[0].text
    assert parts[-1].finish_reason == "stop"
    await client.close()
