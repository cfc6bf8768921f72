"""The console in a real browser, against a real server with keys on.

What depends on the console's own files alone is exhaustive: a change of them asks for it.
"""

import itertools
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import httpx
import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from loraplex.launcher.demo import adapter_paths
from loraplex.router.api.admin.fleet import (
    FleetObject,
    PlaceObject,
    RegisteredObject,
    RouterObject,
    WorkerObject,
    WorkObject,
)
from loraplex.router.names.rollout_tally import SLICE_S
from tests.e2e.browsing import STEP_MS, chromium, console_pages, forget
from tests.e2e.serving import ROOT, Serving, start_serving

KEY = "admin-key-of-the-test"
MESSAGE = "Please cancel order #10442 for two linen aprons, it is urgent. Thanks, Ines Novak"
ANSWERS = {
    "json": '{"name": "Ines Novak", "intent": "cancel", "product": "linen aprons", "quantity": 2, '
    '"order": "10442", "city": null}',
    "sql": "INSERT INTO cancellations (customer, order_no, product, quantity) "
    "VALUES ('Ines Novak', '10442', 'linen aprons', 2);",
}
expect.set_options(timeout=STEP_MS)
# What a page without a key is told; the browser reports it as an error of loading.
LOCKED = re.compile(r"status of 40[13]")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Its device has room for a few of the demo's adapters."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "admin-key").write_text(KEY)
    broken = folder / "own" / "broken"
    shutil.copytree(adapter_paths()["summary"], broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    server = start_serving(
        *("--adapter-root", str(broken.parent)),
        *("--admin-key-file", str(folder / "admin-key"), "--cache-dir", str(folder / "cache")),
        *("--adapter-memory", "4MiB", "--host-adapter-memory", "8MiB", "--auth", "keys"),
        *("--files-dir", str(folder / "files")),
        log=folder / "log",
    )
    yield server
    with httpx.stream(  # a stream that nobody ends does not hold up the stop
        "GET",
        f"{server.url}/v1/fleet",
        headers={"authorization": f"Bearer {KEY}", "accept": "text/event-stream"},
    ) as watching:
        assert watching.status_code == 200
        server.process.terminate()
        assert server.process.wait(timeout=240) == 0, server.log.read_text()[-4000:]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Browser, keyed: Serving) -> Iterator[BrowserContext]:
    with console_pages(browser, keyed.url) as context:
        yield context


@pytest.fixture(scope="module")
def lenient(browser: Browser, keyed: Serving) -> Iterator[BrowserContext]:
    """For axe-core, which makes elements of text: the policy forbids that."""
    with console_pages(browser, keyed.url, bypass_csp=True) as context:
        yield context


@pytest.fixture(scope="module")
def api_key(keyed: Serving) -> str:
    headers = {"authorization": f"Bearer {KEY}"}
    made = httpx.post(f"{keyed.url}/v1/keys", headers=headers, json={"id": "console"}, timeout=240)
    return str(made.raise_for_status().json()["key"])


class Opener:
    """Opens pages and gathers what their consoles complain of."""

    def __init__(self, context: BrowserContext, url: str, api_key: str) -> None:
        self.url = url
        self.api_key = api_key
        self.complaints: list[str] = []
        self.pages: list[Page] = []
        self._context = context

    def open(self, view: str = "fleet", keys: bool = True) -> Page:
        """keys: put where the page itself keeps what was typed."""
        page = self._context.new_page()
        self.pages.append(page)
        page.on("console", lambda said: self._hear(said.type, said.text))
        page.on("pageerror", lambda error: self._hear("error", str(error)))
        page.on("request", self._check_request)
        if keys:
            for name, key in (("admin-key", KEY), ("api-key", self.api_key)):
                page.add_init_script(f"sessionStorage.setItem('loraplex.{name}', '{key}')")
        page.goto(f"{self.url}/console#{view}")
        return page

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not LOCKED.search(text):
            self.complaints.append(text)

    def _check_request(self, request: Any) -> None:
        if not request.url.startswith(self.url) or KEY in request.url or "lpx_" in request.url:
            self.complaints.append(f"asked for {request.url}")


@pytest.fixture
def opener(context: BrowserContext, keyed: Serving, api_key: str) -> Iterator[Opener]:
    yield from opening(Opener(context, keyed.url, api_key))


@pytest.fixture
def checked(lenient: BrowserContext, keyed: Serving, api_key: str) -> Iterator[Opener]:
    """Opens pages that axe-core looks at."""
    yield from opening(Opener(lenient, keyed.url, api_key))


def opening(opener: Opener) -> Iterator[Opener]:
    yield opener
    for page in opener.pages:
        forget(page)
    assert opener.complaints == []


def live(page: Page) -> None:
    expect(page.locator("#live")).to_have_text("Live")


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.className"))


def run_prompt(page: Page, *models: str) -> None:
    expect(page.locator("#chosen .chip")).not_to_have_count(0)  # once models are known
    for name in page.locator("#chosen .chip").all_inner_texts():
        page.get_by_role("button", name=f"Remove {name.split(chr(10))[0].rstrip('×')}").click()
    for model in models:
        page.locator("#model-filter").fill(model)
        page.locator("#model-filter").press("Enter")
    page.locator("#prompt").fill(MESSAGE)
    page.get_by_role("button", name="Run").click()
    expect(page.locator("#run")).to_be_enabled()


def test_adapters_side_by_side_and_the_picture_follows(opener: Opener) -> None:
    page = opener.open()
    live(page)
    arena = page.locator("canvas.arena.device")
    expect(arena).to_have_attribute("aria-label", re.compile("0 adapters"))
    blank = arena.screenshot()
    page.get_by_role("tab", name="Playground").click()
    run_prompt(page, "json", "sql", "loraplex/demo")
    for name, answer in ANSWERS.items():
        column = page.get_by_role("article", name=name)
        expect(column.locator(".output")).to_have_text(answer)
        first, rate, tokens = column.locator("dd").all_inner_texts()
        assert re.fullmatch(r"[\d.]+ m?s", first)
        assert float(rate.replace(",", "")) > 0
        assert int(tokens) > 10
    expect(page.get_by_role("article", name="loraplex/demo").locator(".output")).not_to_be_empty()
    page.get_by_role("tab", name="Fleet").click()
    expect(arena).to_have_attribute("aria-label", re.compile("2 adapters"))
    deadline = time.monotonic() + STEP_MS / 1000
    while arena.screenshot() == blank:  # it is painted behind its label
        assert time.monotonic() < deadline
    row = page.get_by_role("option").filter(has_text="json")
    expect(row).to_contain_text("on 1 device")


def test_keys_are_typed_kept_in_the_tab_and_never_shown(opener: Opener) -> None:
    page = opener.open(keys=False)
    expect(page.locator("#fleet-notice")).to_contain_text("wants the admin key")
    page.get_by_role("button", name="Type a key").click()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#live")).to_have_text("Locked")
    expect(page.locator("#fleet-notice")).to_contain_text("The admin key is wrong")
    expect(page.locator("#announcer")).to_have_text("The admin key is wrong.")
    page.keyboard.press("k")
    expect(page.locator("#admin-key")).to_be_focused()
    page.locator("#admin-key").fill(KEY)
    page.keyboard.press("Enter")
    live(page)
    expect(page.locator("#fleet-notice")).to_be_hidden()
    kept = page.evaluate("[JSON.stringify(sessionStorage), JSON.stringify(localStorage)]")
    assert KEY in kept[0]
    assert KEY not in kept[1] + page.url + page.context.cookies().__repr__()
    page.reload()
    live(page)
    page.keyboard.press("k")
    page.get_by_role("button", name="Forget").click()
    expect(page.locator("#live")).to_have_text("Locked")


def confirm(page: Page, button: str, verb: str = "", **typed: str) -> None:
    """In the dialog that a button opens."""
    page.get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog")
    for field, text in typed.items():
        dialog.locator(f"[name={field}]").fill(text)
    dialog.get_by_role("button", name=verb or button, exact=True).click()


def test_adapters_are_changed_with_a_confirmation(opener: Opener, keyed: Serving) -> None:
    page = opener.open()
    live(page)
    admin = {"authorization": f"Bearer {KEY}"}

    def state() -> dict[str, Any]:
        url = f"{keyed.url}/v1/adapters/mine"
        answer: dict[str, Any] = httpx.get(url, headers=admin, timeout=240).json()
        return answer

    paths = {name: f"local:{path}" for name, path in adapter_paths().items()}
    confirm(page, "Register…", "Register", name="mine", ref="local:/no/such/folder")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("alert")).to_contain_text("allowed root")
    dialog.locator("[name=ref]").fill(paths["pirate"])
    dialog.get_by_role("button", name="Register", exact=True).click()
    expect(dialog).to_have_count(0)
    page.get_by_role("option").filter(has_text="mine").click()
    card = page.locator("#adapter-card")
    expect(card.get_by_role("heading", name="mine")).to_be_visible()
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(dialog).to_contain_text("Pin mine?")
    dialog.get_by_role("button", name="Cancel").click()
    assert not state()["pinned"], "nothing is done without the confirmation"
    confirm(page, "Pin")
    expect(card.get_by_role("button", name="Unpin")).to_be_visible()
    assert state()["pinned"]
    confirm(page, "Refresh")
    expect(page.locator("#announcer")).to_have_text("Refresh: mine is done.")
    confirm(page, "Roll out", ref=paths["summary"], weight="10")
    expect(card.get_by_role("button", name="Roll back")).to_be_visible()
    assert [one["weight"] for one in state()["rollout"]["versions"]] == [90, 10]
    confirm(page, "Promote")
    expect(card.get_by_role("button", name="Promote")).to_have_count(0)
    assert state()["ref"] == paths["summary"]
    confirm(page, "Remove")
    expect(page.get_by_role("option").filter(has_text="mine")).to_have_count(0)
    assert state()["error"]["code"] == "gone"


@pytest.mark.exhaustive
def test_changes_want_the_admin_key(opener: Opener) -> None:
    page = opener.open()
    live(page)
    page.evaluate("sessionStorage.removeItem('loraplex.admin-key')")
    page.get_by_role("button", name="Register…").click()
    expect(page.locator("#admin-key")).to_be_focused()


def test_the_playground_asks_for_the_key_that_it_lacks(opener: Opener) -> None:
    page = opener.open("playground", keys=False)
    expect(page.locator("#models .empty")).to_contain_text("key")
    page.locator("#model-filter").fill("sql")
    page.locator("#model-filter").press("Enter")
    page.locator("#prompt").fill(MESSAGE)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#api-key")).to_be_focused()
    page.keyboard.type(opener.api_key)
    page.keyboard.press("Enter")
    expect(page.locator("#models .row:visible")).not_to_have_count(0)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("article", name="sql").locator(".output")).to_have_text(ANSWERS["sql"])
    assert opener.api_key not in page.url


@pytest.mark.exhaustive
def test_stop(opener: Opener) -> None:
    page = opener.open("playground")
    page.route("**/v1/chat/completions", lambda route: None)  # it never answers
    expect(page.locator("#chosen .chip")).to_have_count(3)
    page.locator("#prompt").fill(MESSAGE)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#stop")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator(".column .state")).to_have_text(["stopped"] * 3)
    expect(page.locator("#run")).to_be_enabled()


@pytest.mark.exhaustive
def test_what_an_error_says_stands_in_its_column(opener: Opener) -> None:
    page = opener.open("playground")
    page.on("console", lambda said: None)
    run_prompt(page, "nobody/knows")
    expect(page.locator(".column .state")).to_contain_text(re.compile(r"error \d+"))
    expect(page.locator(".column .failure")).not_to_be_empty()
    opener.complaints = [c for c in opener.complaints if "Failed to load resource" not in c]


@pytest.mark.exhaustive
def test_a_link_brings_prompt_models_and_parameters_back(opener: Opener) -> None:
    page = opener.open("playground")
    page.get_by_text("Parameters").click()
    page.get_by_label("Max tokens").fill("9")
    run_prompt(page, "sql")
    assert KEY not in page.url
    again = opener.open(page.url.partition("#")[2])
    expect(again.locator("#prompt")).to_have_value(MESSAGE)
    expect(again.locator("#max-tokens")).to_have_value("9")
    expect(again.locator("#chosen .chip")).to_have_text(["sql×"])


@pytest.mark.exhaustive
def test_by_keyboard_alone(opener: Opener) -> None:
    page = opener.open()
    live(page)
    page.keyboard.press("Tab")
    assert focused(page) == "skip"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Tab")
    assert focused(page) == "tab-fleet"
    page.keyboard.press("ArrowRight")
    assert focused(page) == "tab-playground"
    expect(page.locator("#chosen")).to_contain_text("loraplex/demo")  # once models are known
    page.keyboard.press("/")
    page.keyboard.type("pirate")
    page.keyboard.press("Enter")
    expect(page.locator("#chosen")).to_contain_text("pirate")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    expect(page.locator("#chosen")).not_to_contain_text("loraplex/demo")
    page.locator("#prompt").focus()
    page.keyboard.type(MESSAGE)
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("article", name="pirate").locator(".output")).to_contain_text("Arrr")
    expect(page.locator("#announcer")).to_contain_text("finished")
    page.locator("#main").focus()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.locator("#main").focus()
    page.keyboard.press("1")
    arena = page.locator("canvas.arena.device")
    expect(arena).to_have_attribute("aria-label", re.compile("[1-9] adapter"))
    arena.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#announcer")).to_contain_text("iB")
    page.keyboard.press("Enter")
    expect(page.locator("#adapters .row[aria-selected=true]")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.locator("#adapters .row[aria-selected=true]")).to_have_count(0)


def brightness(page: Page) -> int:
    colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.mark.exhaustive
def test_the_theme_is_the_systems_until_one_is_chosen(opener: Opener) -> None:
    page = opener.open()
    page.emulate_media(color_scheme="dark")
    assert brightness(page) < 150
    page.emulate_media(color_scheme="light")
    assert brightness(page) > 600
    page.keyboard.press("t")
    page.keyboard.press("t")
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert brightness(page) < 150
    page.reload()
    assert brightness(page) < 150


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("view", "scheme"), [*product(["fleet", "playground", "batches"], ["light", "dark"])]
)
def test_accessible(checked: Opener, view: str, scheme: Any) -> None:
    """By axe-core, contrast included."""
    page = checked.open(view)
    page.emulate_media(color_scheme=scheme)
    live(page)
    if view == "playground":
        run_prompt(page, "json", "nobody/knows")
        checked.complaints = [c for c in checked.complaints if "Failed to load resource" not in c]
    assert_accessible(page)


def assert_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.exhaustive
def test_fits_a_phone(opener: Opener) -> None:
    page = opener.open()
    page.set_viewport_size({"width": 390, "height": 844})
    live(page)
    for view in ("fleet", "playground", "batches"):
        page.locator(f"#tab-{view}").click()
        expect(page.locator(f"#tab-{view}")).to_have_attribute("aria-selected", "true")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view


class Operator:
    """Rolls a name out, and sends callers to it.

    A caller is drawn for one version for good, so that few of them may all have the old one.
    """

    def __init__(self, url: str, api_key: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=240)
        self.admin = {"authorization": f"Bearer {KEY}"}
        self.caller = {"authorization": f"Bearer {api_key}"}
        self.users = itertools.count()

    def do(self, method: str, path: str, **body: Any) -> None:
        url = f"/v1/adapters{path}"
        self.http.request(method, url, json=body or None, headers=self.admin).raise_for_status()

    def roll_out(self, **weights: int) -> None:
        paths = {**adapter_paths(), "broken": "broken"}
        versions = [
            {"reference": f"local:{paths[name]}", "weight": weight}
            for name, weight in weights.items()
        ]
        guards = {"min_requests": 5, "max_latency_ratio": None}
        self.do("POST", "/support/rollout", versions=versions, guards=guards)

    def chat(self, users: int) -> None:
        """Sends a chat of each of so many new callers."""
        messages = [{"role": "user", "content": "hello"}]
        for user in itertools.islice(self.users, users):
            body = {"model": "support", "messages": messages, "max_tokens": 1, "user": f"u{user}"}
            self.http.post("/v1/chat/completions", json=body, headers=self.caller)

    def chat_until(self, condition: Callable[[], bool]) -> None:
        """Chats until the condition holds: a version's first seconds are not judged yet."""
        deadline = time.monotonic() + STEP_MS / 1000 + SLICE_S
        while not condition():
            assert time.monotonic() < deadline
            self.chat(10)


@pytest.fixture
def operator(keyed: Serving, api_key: str) -> Iterator[Operator]:
    operator = Operator(keyed.url, api_key)
    operator.do("POST", "", name="support", ref=f"local:{adapter_paths()['pirate']}")
    yield operator
    operator.do("DELETE", "/support")
    operator.http.close()


@pytest.mark.exhaustive
def test_a_rollout_from_its_begin_to_its_end(operator: Operator, opener: Opener) -> None:
    """The page is open all the time, and is told by nobody but the router."""
    page = opener.open()
    live(page)
    row = page.get_by_role("option").filter(has_text=re.compile("^support"))
    row.first.click()
    card = page.locator("#adapter-card")
    expect(card).to_contain_text("no rollout")
    expect(card.locator(".history li")).to_have_count(1)
    expect(card.locator(".history")).to_contain_text("register by api")
    operator.roll_out(polite=30)
    old, new = (card.locator(".versions li").nth(number) for number in range(2))
    expect(new.locator("strong")).to_have_text("30 %")
    expect(new).to_contain_text("…/adapters/polite")
    expect(old.locator("strong")).to_have_text("70 %")
    expect(card.locator(".shares").first).to_have_attribute("aria-label", re.compile("30 %$"))
    expect(row.first.locator(".badge")).to_have_text("30 % new")
    expect(card).to_contain_text("Goes back at 5 % more failures, in 300 seconds.")
    expect(new).to_contain_text("Judged after 5 requests.")
    operator.chat_until(lambda: "No worse than the old one." in new.inner_text())
    expect(old).to_contain_text(re.compile(r"old · \d+ requests · 0 % failed · p95 "))
    operator.roll_out(broken=50)
    expect(new.locator("strong")).to_have_text("50 %")
    operator.chat_until(lambda: "taken back" in new.inner_text())
    expect(new.locator(".verdict")).to_have_text(re.compile(r"^100\.0% of its \d+ requests failed"))
    expect(old.locator("strong")).to_have_text("100 %")
    expect(card.locator(".history li").first).to_contain_text("rollback by guard")
    operator.do("DELETE", "/support/rollout")
    expect(card.locator(".versions")).to_be_hidden()
    expect(card.locator(".history li").first).to_contain_text("ended")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    opener.complaints = [c for c in opener.complaints if "status of 409" not in c]


@pytest.mark.exhaustive
def test_what_is_missing_or_wrong_is_reported(operator: Operator, opener: Opener) -> None:
    """In the list in short, and in full on the card of what was chosen, by its name if need be."""
    partial = {"modules": 8, "targeted_modules": 24, "layers": 2, "targeted_layers": 6}
    words = "partial: 8 of 24 targeted modules have weights, 16 are missing; 2 of 6 layers: 0-1"
    why = "nowhere/there has no adapter_config.json; " * 4

    def change(route: Route) -> None:
        answer = route.fetch(headers={**route.request.headers, "accept": "application/json"})
        told = answer.json()
        for adapter in told["adapters"]:
            if adapter["name"] == "json":
                adapter["partial"] = {**partial, "message": words}
            if adapter["name"] == "sql":
                adapter["error"], adapter["digest"] = why, None
        body = f"event: fleet\ndata: {msgspec.json.encode(told).decode()}\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page = opener.open()
    page.route("**/v1/fleet", change)
    page.reload()
    rows = page.get_by_role("option")
    partly = rows.filter(has_text=re.compile("^json"))
    expect(partly).to_contain_text("2 of 6 layers")
    expect(partly.locator(".badge")).to_have_text("partial")
    failed = rows.filter(has_text=re.compile("^sql"))
    expect(failed.locator(".badge")).to_have_text("error")
    failed.click()
    card = page.locator("#adapter-card")
    expect(card).to_contain_text(why.capitalize().strip())
    expect(page.locator("#adapters .row[aria-selected=true]")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_rollout_is_accessible(operator: Operator, checked: Opener, scheme: Any) -> None:
    """Pages close before the name is deleted."""
    operator.roll_out(polite=30, broken=30)
    page = checked.open()
    page.emulate_media(color_scheme=scheme)
    live(page)
    page.get_by_role("option").filter(has_text=re.compile("^support")).first.focus()
    page.locator("#adapters .list").focus()
    page.keyboard.press("End")
    page.get_by_role("option").filter(has_text=re.compile("^support")).first.click()
    operator.chat_until(lambda: "taken back" in page.locator("#adapter-card").inner_text())
    expect(page.locator("#adapter-card .history li").first).to_contain_text("rollback")
    assert_accessible(page)


# Many workers and adapters, of which only those in sight are drawn


def picture(workers: int, adapters: int, each: int, extents: int = 8192) -> FleetObject:
    """So many workers, of so many adapters; every worker has `each` of them in memory."""
    chance = random.Random(5)
    digests = [f"{number:064x}" for number in range(adapters)]

    def one(number: int) -> WorkerObject:
        at = 0
        places = []
        for digest in chance.sample(digests, each):
            count = chance.randint(1, max(1, extents // each - 1))
            spans = ((at, count),)
            at += count + chance.randint(0, 1)
            places.append(
                PlaceObject(digest, None, "ready", "ready", False, None, None, spans, spans)
            )
        return WorkerObject(
            url=f"ws://10.0.0.{number}:8090",
            id=f"worker-{number}",
            state="ready",
            device="cuda",
            extent_bytes=1 << 20,
            device_extents=extents,
            host_extents=extents,
            in_use=dict.fromkeys(digests[:9], 1),
            places=tuple(places),
        )

    registered = tuple(
        RegisteredObject(f"adapter-{i}", "hub:a/b", "ready", False, digest, (16,), 1000, None)
        for i, digest in enumerate(digests)
    )
    router = RouterObject(0, 1024, 0, 0, 4096)
    shown = tuple(one(number) for number in range(workers))
    work = WorkObject({"vector": 0, "classes": 0, "fit": 0}, None)
    return FleetObject(1.0, "1", None, router, work, shown, registered, 0, [], [])


def tell(page: Page, fleet: FleetObject) -> None:
    body = b"event: fleet\ndata: " + msgspec.json.encode(fleet) + b"\n\n"

    def answer(route: Route) -> None:
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body)

    page.route("**/v1/fleet", answer)
    page.route("**/v1/adapters/*/history*", lambda route: route.fulfill(json={"data": []}))


@pytest.mark.exhaustive
def test_a_thousand_adapters_on_64_workers(opener: Opener) -> None:
    page = opener.open("playground")
    tell(page, picture(64, 1000, 60))
    page.keyboard.press("1")
    page.reload()
    expect(page.locator(".worker")).to_have_count(64)
    expect(page.locator("#adapters-count")).to_have_text("1,000")
    assert page.locator("#adapters .row").count() < 60
    drawn = "[...document.querySelectorAll('canvas.arena')].filter((c) => c.width !== 300).length"
    page.wait_for_function(f"{drawn} > 0")
    assert page.evaluate(drawn) < 64
    page.locator("#adapter-filter").fill("adapter-99")
    expect(page.locator("#adapters-count")).to_have_text("11 of 1,000")
    page.get_by_role("option", name="adapter-999").click()
    expect(page.locator("#adapters .row[aria-selected=true]")).to_have_text(
        re.compile("adapter-999")
    )
    page.locator("#adapter-filter").fill("no such name")
    expect(page.locator("#adapters .empty")).to_contain_text("No adapter has")


@pytest.mark.exhaustive
def test_equal_names_are_distinguished(opener: Opener) -> None:
    page = opener.open("playground")
    fleet, owners = picture(1, 3, 3), (None, "acme", "globex")
    adapters = tuple(
        msgspec.structs.replace(adapter, name="sql", tenant=tenant)
        for adapter, tenant in zip(fleet.adapters or (), owners, strict=True)
    )
    tell(page, msgspec.structs.replace(fleet, adapters=adapters))
    page.keyboard.press("1")
    page.reload()
    rows = page.locator("#adapters .row")
    expect(rows).to_have_count(3)
    for row, spelled in enumerate(("sql", "acme::sql", "globex::sql")):
        expect(rows.nth(row)).to_contain_text(re.compile(rf"^{spelled}rank"))
    rows.nth(1).click()
    expect(page.locator("#adapters .row[aria-selected=true]")).to_contain_text("acme::sql")
    page.locator("#adapter-filter").fill("globex")
    expect(page.locator("#adapters-count")).to_have_text("1 of 3")


@pytest.mark.exhaustive
def test_a_router_that_is_gone_leaves_the_last_picture(opener: Opener) -> None:
    page = opener.open("playground")
    tell(page, picture(2, 5, 5))
    page.keyboard.press("1")
    page.reload()
    expect(page.locator(".worker")).to_have_count(2)
    page.route("**/v1/fleet", lambda route: route.abort())
    expect(page.locator("#live")).to_have_text("Reconnecting")
    expect(page.locator("#fleet-notice")).to_contain_text("Reconnecting")
    expect(page.locator(".worker")).to_have_count(2)
    page.unroute("**/v1/fleet")
    live(page)
    opener.complaints = [c for c in opener.complaints if "Failed to load resource" not in c]


@pytest.mark.exhaustive
def test_blocks_are_to_scale(opener: Opener) -> None:
    """Every adapter's width is its bytes, whatever rows it wraps into; nothing overlaps."""
    page = opener.open("playground")
    extents, width, rows = 500, 600, 4
    fleet = picture(1, 40, 40, extents)
    (worker,) = fleet.workers
    boxes = page.evaluate(
        """async ([places, extents, width, rows]) => {
            const { segments, layout } = await import("/console/segments.js");
            const drawn = layout(segments(places, "device", extents), extents, width, rows);
            return drawn.boxes.map((b) => [b.segment.place?.digest ?? null, b.row, b.x, b.width]);
        }""",
        [msgspec.to_builtins(worker.places), extents, width, rows],
    )
    ends = {row: 0.0 for _, row, _, _ in boxes}
    widths: dict[str, float] = {}
    for digest, row, x, wide in boxes:
        assert x == pytest.approx(ends[row], abs=1e-3)
        ends[row] = x + wide
        assert ends[row] <= width + 1e-3
        widths[digest] = widths.get(digest, 0.0) + wide
    scale = len(ends) * width / extents
    for place in worker.places or ():
        assert widths[place.digest] == pytest.approx(place.device_spans[0][1] * scale)


def test_the_readmes_picture() -> None:
    """Small enough for a README; `tests/e2e/console_picture.py` draws it."""
    png = (ROOT / "docs/images/console.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) < 300_000
