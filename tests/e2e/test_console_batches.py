"""The console's batches in a real browser: progress, failures, files, an early end."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.e2e.browsing import STEP_MS, chromium, console_pages, forget
from tests.e2e.serving import Serving

expect.set_options(timeout=STEP_MS)
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Browser, serving: Serving) -> Iterator[BrowserContext]:
    with console_pages(browser, serving.url) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext, serving: Serving) -> Iterator[Page]:
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.goto(f"{serving.url}/console#batches")
    yield page
    forget(page)
    assert complaints == []


@pytest.fixture(scope="module")
def model(serving: Serving) -> str:
    """The base's name."""
    listed = httpx.get(f"{serving.url}/v1/models", timeout=TIMEOUT_S).json()["data"]
    return str(next(each["id"] for each in listed if each["parent"] is None))


def line(model: str, number: int, **body: Any) -> dict[str, Any]:
    wanted = {"model": model, "prompt": f"{number} is", "max_tokens": 4} | body
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": wanted,
    }


def make(serving: Serving, name: str, lines: Sequence[dict[str, Any]]) -> str:
    with httpx.Client(base_url=serving.url, timeout=TIMEOUT_S) as client:
        data = "".join(json.dumps(each) + "\n" for each in lines)
        stored = client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "batch"})
        body = {
            "input_file_id": stored.raise_for_status().json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        return str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])


def batch(page: Page, batch_id: str) -> Locator:
    return page.locator(f".batch[data-id={batch_id}]")


def test_from_its_begin_to_its_answers(
    page: Page, serving: Serving, model: str, tmp_path: Path
) -> None:
    lines = [line(model, number) for number in range(6)]
    lines.append(line(model, 6, temperature="warm"))
    row = batch(page, make(serving, "asked.jsonl", lines))
    expect(row.locator(".status")).to_have_text("completed")
    expect(row).to_contain_text("7 of 7 lines answered")
    expect(row).to_contain_text("asked.jsonl")
    row.get_by_text("1 line failed").click()
    expect(row.locator("details p").first).to_contain_text("line-6")
    expect(row.locator("details p").first).to_contain_text("temperature")
    with page.expect_download() as saved:
        row.get_by_role("button", name="Save answers").click()
    saved.value.save_as(tmp_path / "answers")
    answers = [json.loads(each) for each in (tmp_path / "answers").read_text().splitlines()]
    assert {each["custom_id"] for each in answers} == {f"line-{i}" for i in range(6)}
    expect(page.locator("#files")).to_contain_text("asked.jsonl")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save asked.jsonl").click()
    saved.value.save_as(tmp_path / "asked")
    assert len((tmp_path / "asked").read_text().splitlines()) == len(lines)


def test_an_early_end_takes_two_clicks(page: Page, serving: Serving, model: str) -> None:
    lines = [line(model, number, max_tokens=200, ignore_eos=True) for number in range(3000)]
    row = batch(page, make(serving, "long.jsonl", lines))
    expect(row.locator(".status")).to_have_text("running")
    row.get_by_role("button", name="Cancel").click()
    row.get_by_role("button", name="Cancel it now?").click()
    expect(row.locator(".status")).to_have_text("cancelled")
    expect(row.get_by_role("button", name="Cancel")).to_have_count(0)


def test_the_fleet_shows_other_work(page: Page, serving: Serving, model: str) -> None:
    body = {"model": model, "input": ["a", "b", "c"]}
    answer = httpx.post(f"{serving.url}/v1/embeddings", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    page.keyboard.press("1")
    expect(page.locator("#work")).to_contain_text("vectors so far")
    expect(page.locator("#work")).to_contain_text("Batches: ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(browser: Browser, serving: Serving, model: str, scheme: Any) -> None:
    batch_id = make(serving, "seen.jsonl", [line(model, 0, temperature="warm")])
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.goto(f"{serving.url}/console#batches")
    expect(batch(page, batch_id)).to_contain_text("1 of 1 line answered")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()
