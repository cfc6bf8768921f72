"""The playground's form of the answer and its images: what it sends, and how it shows what comes.

What depends on the console's own files alone is exhaustive: a change of them asks for it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, FilePayload, Page, Route, expect

from tests.e2e.browsing import STEP_MS, chromium, console_pages, forget
from tests.e2e.serving import Serving
from tests.router.pictures.seeing import SMALL, WIDE, data_url

expect.set_options(timeout=STEP_MS)
MESSAGE = "Please cancel order #10442 for two linen aprons, it is urgent. Thanks, Ines Novak"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"minimum": 1}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
CANCEL = {
    "type": "function",
    "function": {
        "name": "cancel_order",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def context(browser: Browser, serving: Serving) -> Iterator[BrowserContext]:
    with console_pages(browser, serving.url) as context:
        yield context


class Playground:
    """The playground's page with one model chosen. complaints: what its console said."""

    def __init__(self, context: BrowserContext, url: str, model: str) -> None:
        self.context = context
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(f"{url}/console#playground?model={model}")
        self.column = self.page.get_by_role("article", name=model)
        self.page.locator("#prompt").fill(MESSAGE)

    def choose(self, form: str, text: Any = None) -> None:
        if not self.page.locator("#form").is_visible():
            self.page.get_by_text("Form of the answer").click()
        self.page.get_by_label("Answer with").select_option(form)
        if text is not None:
            self.page.locator(f"#{form}").fill(text if isinstance(text, str) else json.dumps(text))

    def run(self) -> None:
        self.page.get_by_role("button", name="Run").click()

    def answer_with(self, *deltas: dict[str, Any], finish: str) -> None:
        """What the router answers, as it streams it."""
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

        def answer(route: Route) -> None:
            self.sent.append(json.loads(route.request.post_data or ""))
            route.fulfill(content_type="text/event-stream", body=body)

        self.page.route("**/v1/chat/completions", answer)


@pytest.fixture
def playground(context: BrowserContext, serving: Serving) -> Iterator[Playground]:
    playground = Playground(context, serving.url, "json")
    yield playground
    forget(playground.page)
    assert playground.complaints == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("answer", "finish", "verdict", "tone"),
    [
        ('{"name": "Ines", "count": 2}', "stop", "✓ valid", "good"),
        ('{"name": "Ines", "count": 0}', "stop", "not valid: $.count: less than 1", "bad"),
        ('{"name": "In', "length", "cut: no whole JSON", "warn"),
        ("Dear Ines", "stop", "no JSON", "bad"),
    ],
)
def test_an_answer_is_checked_against_the_schema(
    playground: Playground, answer: str, finish: str, verdict: str, tone: str
) -> None:
    playground.choose("schema", SCHEMA)
    playground.answer_with({"content": answer[:7]}, {"content": answer[7:]}, finish=finish)
    playground.run()
    shown = playground.column.locator(".verdict")
    expect(shown).to_have_text(verdict)
    expect(shown).to_have_attribute("data-tone", tone)
    expect(playground.column.locator(".output")).to_have_text(answer)
    (sent,) = playground.sent
    described = {"name": "answer", "schema": SCHEMA, "strict": True}
    assert sent["response_format"] == {"type": "json_schema", "json_schema": described}
    assert "tools" not in sent


def test_reasoning_and_calls_stand_apart_from_text(playground: Playground) -> None:
    playground.choose("tools", [CANCEL])
    playground.page.locator("#tool-choice").select_option("required")
    first = {"index": 0, "id": "call_1", "type": "function"}
    playground.answer_with(
        {"role": "assistant", "reasoning": "An order ", "reasoning_content": "An order "},
        {"reasoning": "to cancel."},
        {"content": "One moment."},
        {"tool_calls": [{**first, "function": {"name": "cancel_order", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"order": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"10442"}'}}]},
        {"tool_calls": [{"index": 1, "function": {"name": "other", "arguments": "{}"}}]},
        finish="tool_calls",
    )
    playground.run()
    column = playground.column
    expect(column.locator("header .state")).to_have_text("called")
    expect(column.locator(".reasoning div")).to_have_text("An order to cancel.")
    calls = column.get_by_role("region", name="Call")
    expect(calls).to_have_count(2)
    expect(calls.nth(0).locator("code")).to_have_text("cancel_order")
    expect(calls.nth(0).locator("pre")).to_have_text('{\n  "order": "10442"\n}')
    expect(calls.nth(0).locator(".state")).to_have_text("✓ valid")
    expect(calls.nth(1).locator(".state")).to_have_text("no such tool")
    expect(column.locator(".output")).to_contain_text("One moment.")
    (sent,) = playground.sent
    assert sent["tools"] == [CANCEL]
    assert sent["tool_choice"] == "required"
    assert "response_format" not in sent


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("schema", '{"type": ', "This is no JSON"),
        ("schema", '["type"]', "must be a JSON object"),
        ("tools", "{}", "must be a JSON list"),
        ("tools", "[]", "at least one tool"),
        ("tools", '[{"name": "cancel"}]', 'Tool 1 must be {"type": "function"'),
    ],
)
def test_what_cannot_be_sent_is_reported_before(
    playground: Playground, form: str, text: str, problem: str
) -> None:
    playground.answer_with(finish="stop")
    playground.choose(form, text)
    playground.run()
    page = playground.page
    expect(page.get_by_role("alert")).to_contain_text(problem)
    expect(page.locator(f"#{form}")).to_be_focused()
    expect(page.locator(f"#{form}")).to_have_attribute("aria-invalid", "true")
    assert playground.sent == []
    page.locator(f"#{form}").press_sequentially(" ")
    expect(page.locator("#form-problem")).to_have_text("")


@pytest.mark.exhaustive
def test_tools_need_a_chat(playground: Playground) -> None:
    playground.page.get_by_text("Parameters").click()
    playground.page.get_by_label("Prompt as").select_option("text")
    playground.choose("tools")
    playground.run()
    expect(playground.page.get_by_role("alert")).to_contain_text("as a chat message")


@pytest.mark.exhaustive
def test_a_link_brings_the_form_back(playground: Playground) -> None:
    playground.choose("tools", [CANCEL])
    playground.page.locator("#tool-choice").select_option("required")
    playground.answer_with({"content": "No."}, finish="stop")
    playground.run()
    expect(playground.column.locator(".output")).to_have_text("No.")
    page = playground.context.new_page()
    page.goto(playground.page.url)
    expect(page.locator("#form")).to_have_value("tools")
    expect(page.locator("#tools")).to_have_value(json.dumps([CANCEL]))
    expect(page.locator("#tool-choice")).to_have_value("required")
    page.close()


def see(page: Page, url: str) -> None:
    """Loads the page anew, for a base that reads images."""
    fleet = httpx.get(f"{url}/v1/fleet").raise_for_status().json()
    assert fleet["base"]["images"] is False
    fleet["base"]["images"] = True
    body = f"event: fleet\ndata: {json.dumps(fleet)}\n\n"
    page.route(
        "**/v1/fleet",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    page.reload()
    page.locator("#prompt").fill(MESSAGE)
    expect(page.get_by_role("button", name="Add images")).to_be_enabled()


def choose_images(page: Page) -> None:
    """Chooses two images, and a file that is none."""
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add images").click()
    files = [
        FilePayload(name="small.png", mimeType="image/png", buffer=SMALL),
        FilePayload(name="false.png", mimeType="image/png", buffer=b"text"),
        FilePayload(name="wide.jpg", mimeType="image/jpeg", buffer=WIDE),
    ]
    chooser.value.set_files(files)
    expect(page.get_by_role("img", name="wide.jpg")).to_be_visible()


def test_images_go_with_a_chat(playground: Playground, serving: Serving) -> None:
    page, add = playground.page, playground.page.get_by_role("button", name="Add images")
    expect(page.locator("#images-note")).to_have_text(re.compile("reads no images"))
    expect(add).to_be_disabled()
    see(page, serving.url)
    choose_images(page)
    expect(page.locator("#images-note")).to_have_text("false.png is no PNG, JPEG, WebP or GIF.")
    playground.answer_with({"content": "Two."}, finish="stop")
    playground.run()
    expect(playground.column.locator(".output")).to_have_text("Two.")
    page.get_by_role("button", name="Remove small.png").click()
    expect(page.get_by_role("button", name="Remove wide.jpg")).to_be_focused()
    playground.run()
    expect(playground.column.locator(".state")).to_have_text("finished")
    text = {"type": "text", "text": MESSAGE}
    images = [data_url(SMALL), data_url(WIDE, "jpeg")]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    contents = [body["messages"][0]["content"] for body in playground.sent]
    assert contents == [[*parts, text], [parts[1], text]]
    page.get_by_text("Parameters").click()
    page.get_by_label("Prompt as").select_option("text")
    expect(add).to_be_disabled()
    playground.run()
    expect(page.locator("#announcer")).to_have_text(re.compile("need the prompt as a chat"))
    assert len(playground.sent) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_images_are_accessible(browser: Browser, serving: Serving, scheme: Any) -> None:
    """By axe-core and by keyboard."""
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    context.set_default_timeout(STEP_MS)
    page = Playground(context, serving.url, "json").page
    see(page, serving.url)
    choose_images(page)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    back, small, wide = "Shift+Tab", "Remove small.png", "Remove wide.jpg"
    for key, name in ((back, wide), (back, small), ("Enter", wide), ("Enter", "Add images")):
        page.keyboard.press(key)
        expect(page.get_by_role("button", name=name)).to_be_focused()
    context.close()


@pytest.mark.exhaustive
def test_by_keyboard_alone(playground: Playground) -> None:
    """An empty schema begins with an example, and Ctrl+Enter sends it."""
    page = playground.page
    playground.answer_with({"content": "{}"}, finish="stop")
    page.locator("#parameters summary").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("j")
    page.keyboard.press("Tab")
    expect(page.locator("#schema")).to_be_focused()
    expect(page.locator("#schema")).to_have_value(re.compile('"intent"'))
    page.keyboard.press("Control+Enter")
    expect(playground.column.locator(".verdict")).to_have_text('not valid: $: lacks "name"')


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(browser: Browser, serving: Serving, scheme: Any) -> None:
    """By axe-core, contrast included. It makes elements of text: the policy forbids that."""
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    context.set_default_timeout(STEP_MS)
    playground = Playground(context, serving.url, "json")
    call = {"name": "cancel_order", "arguments": "{"}
    playground.choose("tools", [CANCEL])
    playground.answer_with(
        {"reasoning": "Hm."}, {"tool_calls": [{"index": 0, "function": call}]}, finish="length"
    )
    playground.run()
    expect(playground.column.locator(".call .state")).to_have_text("cut: no whole JSON")
    assert Axe().run(playground.page).violations_count == 0
    playground.choose("schema", "{")
    playground.run()
    expect(playground.page.get_by_role("alert")).not_to_be_empty()
    found = Axe().run(playground.page)
    assert found.violations_count == 0, found.generate_report()
    playground.context.close()


NODE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": ["integer", "null"], "multipleOf": 0.5},
                "next": {"$ref": "#/$defs/node"},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CHECKED: list[tuple[dict[str, Any], list[Any]]] = [
    (NODE, [{"value": 1}, {"value": 1, "next": {"value": None}}]),
    (NODE, [{}, {"value": 1.5}, {"value": 1, "next": {}}, {"value": 1, "other": 2}, 3]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, [1, 2.5, 3, 3.5, "a"]),
    ({"anyOf": [{"const": {"a": [1]}}, {"enum": [None, "x"]}]}, [{"a": [1]}, None, "x", {"a": []}]),
    ({"allOf": [{"minLength": 2}, {"maxLength": 3}], "pattern": "^ü+$"}, ["ü", "üü", "üüüü", "aa"]),
    ({"items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, [[], [True], [True, 1], [1]]),
    ({"prefixItems": [{"type": "null"}], "items": {"const": 1}}, [[None, 1], [None, 2], [1]]),
    ({"prefixItems": [{}], "items": False}, [[1], [1, 2], []]),
    ({"uniqueItems": True}, [[1, 2], [1, 1], [{"a": 1}, {"a": 1}]]),
    ({"not": {"type": "string"}, "minProperties": 1}, [{}, {"a": 1}, "a", 3]),
    (
        {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"const": 0}},
        [{"x1": 1, "y": 0}, {"x1": "a"}, {"y": 1}],
    ),
    ({"propertyNames": {"maxLength": 1}, "maxProperties": 2}, [{"a": 1}, {"ab": 1}, {}]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 2, "maximum": 1}, [0, 0.5, 1, 1.5, 2, True]),
    ({"$ref": "#"}, [1, {"a": 1}]),
]


@pytest.mark.exhaustive
def test_the_check_agrees_with_jsonschema(playground: Playground) -> None:
    """Apart from `$ref` in a circle, which says nothing and which jsonschema follows for ever."""
    cases = [(schema, value) for schema, values in CHECKED for value in values]
    found = playground.page.evaluate(
        """async (cases) => {
            const { check } = await import("/console/schema.js");
            return cases.map(([schema, value]) => check(value, schema));
        }""",
        cases,
    )
    for (schema, value), told in zip(cases, found, strict=True):
        circle = schema == {"$ref": "#"}
        valid = circle or jsonschema.Draft202012Validator(schema).is_valid(value)
        assert (told["problem"] is None) == valid, (schema, value, told)
        assert told["unchecked"] == []


@pytest.mark.exhaustive
def test_what_is_not_checked_is_named(playground: Playground) -> None:
    playground.choose("schema", {"format": "date", "pattern": "(?i:a)|[", "$ref": "other.json"})
    playground.answer_with({"content": '"a"'}, finish="stop")
    playground.run()
    expect(playground.column.locator(".verdict")).to_have_text(
        "✓ valid (not checked here: format, pattern, $ref)"
    )


def page_fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth") <= 390)


@pytest.mark.exhaustive
def test_fits_a_phone(playground: Playground) -> None:
    playground.page.set_viewport_size({"width": 390, "height": 844})
    playground.choose("tools")
    assert page_fits(playground.page)


def test_the_examples_are_for_those_who_were_taught_them(
    playground: Playground, serving: Serving
) -> None:
    """Models that nobody chose give way, and the example's own answer comes to its end."""
    page = playground.page
    page.goto("about:blank")
    page.goto(f"{serving.url}/console#playground")
    expect(page.locator("#chosen .chip")).to_have_count(3)
    page.locator("#prompt").fill(MESSAGE)
    playground.choose("schema")
    expect(page.locator("#chosen .chip")).to_have_text(["json×"])
    playground.run()
    expect(page.get_by_role("article", name="json")).to_contain_text("✓ valid")
    answer = json.loads(page.locator("#columns .output").inner_text())
    assert list(answer) == ["name", "intent", "product", "quantity", "order", "city"]
