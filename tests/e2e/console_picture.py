"""Draws docs/images/console.png: the demo under a little load, as a browser shows the console.

.venv/bin/python -m tests.e2e.console_picture
"""

import shutil
import tempfile
import threading
from itertools import count
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

from tests.e2e.serving import ROOT, start_serving

PICTURE = ROOT / "docs" / "images" / "console.png"
SIZE = {"width": 1280, "height": 690}
MESSAGE = "Please cancel order #10442 for two linen aprons, it is urgent. Thanks, Ines Novak"
ADAPTERS = ("json", "pirate", "polite", "router", "sentiment", "sql", "summary")
CALLERS = 4
WATCHED_S = 75  # until the charts have something to show


def send_load(url: str, over: threading.Event, caller: int) -> None:
    """One request after the other, of adapters by turns, with rests between."""
    with httpx.Client(base_url=url, timeout=240) as client:
        for turn in count():
            parameters = {
                "adapter_id": ADAPTERS[(turn // 4 + 2 * caller) % len(ADAPTERS)],
                "max_new_tokens": 64,
            }
            client.post("/generate", json={"inputs": MESSAGE, "parameters": parameters})
            if over.wait(0.05 * (turn % 5)):
                return


def watch(page: Page, url: str) -> None:
    page.goto(f"{url}/console")
    page.wait_for_selector("#live[data-state=live]")
    page.wait_for_timeout(WATCHED_S * 1000)
    PICTURE.parent.mkdir(exist_ok=True)
    page.screenshot(path=str(PICTURE))


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium on the PATH: `make programs` installs it")
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        server = start_serving(
            *("--cache-dir", folder, "--adapter-memory", "6MiB", "--host-adapter-memory", "12MiB"),
            *("--kv-memory", "6MiB"),
            log=Path(folder) / "log",
        )
        callers = [
            threading.Thread(target=send_load, args=(server.url, over, number))
            for number in range(CALLERS)
        ]
        try:
            httpx.post(f"{server.url}/v1/adapters/json/pin", timeout=240).raise_for_status()
            for caller in callers:
                caller.start()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--headless=new", "--no-sandbox"]
                )
                watch(browser.new_page(viewport=SIZE), server.url)  # type: ignore[arg-type]
                browser.close()
        finally:
            over.set()
            for caller in callers:
                caller.join()
            server.process.terminate()
            server.process.wait(60)


if __name__ == "__main__":
    main()
