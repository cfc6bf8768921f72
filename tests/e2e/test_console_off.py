"""The console does not ask for what the router was started without."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browsing import STEP_MS, chromium
from tests.e2e.serving import Serving

pytestmark = pytest.mark.exhaustive  # it depends on the console's own files alone
expect.set_options(timeout=STEP_MS)
# Many times as long as the page waits between questions.
LONG_MS = 60_000
OFF = {"error": {"message": "the router was started without --files-dir", "code": "not_served"}}
LOCKED = {"error": {"message": "this route wants the admin key"}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Of a router that has no folder for files."""
    context = browser.new_context()
    context.set_default_timeout(STEP_MS)
    page = context.new_page()
    page.clock.install()
    for path in ("batches", "files"):
        page.route(f"**/v1/{path}?*", lambda route: route.fulfill(status=501, json=OFF))
    yield page
    context.close()


def questions(page: Page) -> list[str]:
    """Those for batches and files, as they are asked."""
    asked: list[str] = []

    def hear(request: Any) -> None:
        if "/v1/batches" in request.url or "/v1/files" in request.url:
            asked.append(request.url)

    page.on("request", hear)
    return asked


def test_the_fleets_picture_says_that_there_are_no_batches(page: Page, serving: Serving) -> None:
    picture = httpx.get(f"{serving.url}/v1/fleet", timeout=240).json()
    picture["work"]["batches"] = None
    event = f"data: {json.dumps(picture)}\n\n"
    page.route(
        "**/v1/fleet", lambda route: route.fulfill(content_type="text/event-stream", body=event)
    )
    asked = questions(page)
    page.goto(f"{serving.url}/console#batches")
    expect(page.locator("#batches-notice")).to_contain_text("Batches are off")
    page.clock.run_for(LONG_MS)
    assert asked == []


def test_a_locked_page_asks_once(page: Page, serving: Serving) -> None:
    page.route("**/v1/fleet", lambda route: route.fulfill(status=401, json=LOCKED))
    asked = questions(page)
    page.goto(f"{serving.url}/console#batches")
    expect(page.locator("#batches-notice")).to_contain_text("Batches are off")
    expect(page.locator("#batches-notice")).to_contain_text("--files-dir")
    page.clock.run_for(LONG_MS)
    assert len(asked) == 1
