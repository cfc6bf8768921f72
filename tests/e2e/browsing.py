"""A real browser for tests of the console."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

STEP_MS = 120_000
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium on the PATH; without one the test is skipped."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on the PATH: `make programs` installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_ARGUMENTS))
        yield browser
        browser.close()


@contextmanager
def console_pages(browser: Browser, url: str, **options: Any) -> Iterator[BrowserContext]:
    """For pages of the console at this address. One page stays open: a process of the browser's for
    each of the others would cost more than what they show."""
    context = browser.new_context(**options)
    context.set_default_timeout(STEP_MS)
    context.new_page().goto(f"{url}/console/icon.svg")
    yield context
    context.close()


def forget(page: Page) -> None:
    """Closes it, and leaves nothing for the pages after it."""
    page.evaluate("localStorage.clear()")
    page.close()
