"""The console's files: what is served, with which headers; nothing comes from elsewhere."""

import re

import pytest

from loraplex.router.routes.console import FOLDER
from tests.router.serving import Running, of_kept_router

FILES = sorted(path.name for path in FOLDER.iterdir())


async def test_the_page_and_its_policy(router: Running) -> None:
    answer = await router.client.get("/console")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    again = await router.client.get("/console", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@of_kept_router
@pytest.mark.parametrize("name", [name for name in FILES if name != "index.html"])
async def test_files(kept_router: Running, name: str) -> None:
    answer = await kept_router.client.get(f"/console/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert "content-security-policy" in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"


@of_kept_router
@pytest.mark.parametrize(
    "path", ["nothing.js", "index.html", "..%2fapp.py", "%2e%2e/app.py", "app.js/", "App.js"]
)
async def test_no_other_file(kept_router: Running, path: str) -> None:
    answer = await kept_router.client.get(f"/console/{path}")
    assert answer.status_code == 404
    assert answer.json()["error_type"] == "not_found"


async def test_a_slash_leads_to_the_page(router: Running) -> None:
    answer = await router.client.get("/console/")
    assert answer.status_code == 308
    assert answer.next_request is not None
    assert answer.next_request.url.path == "/console"


def test_all_that_files_name_is_there_and_nothing_is_inline() -> None:
    page = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="console/([^"]+)"', page))
    for path in FOLDER.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', path.read_text()))
    assert named <= set(FILES)
    assert named | {"index.html"} == set(FILES), "files that nothing uses"
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=|javascript:", page)


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    text = (FOLDER / name).read_text()
    others = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not others
    assert not re.search(r"\beval\(|innerHTML|document\.write|new Function", text)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_modules_stay_short(name: str) -> None:
    assert len((FOLDER / name).read_text().splitlines()) <= 320
