"""Every page of the site in a browser, as wide as a desktop and as a phone: nothing overflows, fails or is missing."""

import threading
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from support.chromium import Visit, find_chromium, open_browser

WIDTHS = (1280, 390)
SCRIPT = """document.fonts.ready.then(() => ({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  wide: [...document.querySelectorAll("body *")]
    .filter(e => e.checkVisibility({visibilityProperty: true}) && !e.closest(".pst-scrollable-table-container, pre"))
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .slice(0, 3).map(e => e.outerHTML.slice(0, 120)),
  links: [...document.querySelectorAll("a[href]")].map(a => a.href),
  anchors: [...document.querySelectorAll("[id]")].map(e => e.id),
}))"""
"""What the test asks each page for. ``wide`` lists elements that the theme clips; wide tables and code scroll by
themselves."""

pytestmark = pytest.mark.slow(reason="builds the site and opens every page in Chromium")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def copyfile(self, source, outputfile):
        """A browser may leave a page before everything has arrived."""
        with suppress(ConnectionError):
            super().copyfile(source, outputfile)


@pytest.fixture(scope="module")
def address(site):
    """Serve the site on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="module")
def visits(site, address, tmp_path_factory) -> dict[tuple[str, int], Visit]:
    """Visit every page in every width."""
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium or Chrome (Debian, Ubuntu: apt install chromium)")
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html") if "_static" not in page.parts)
    assert "index.html" in pages
    with open_browser(program, tmp_path_factory.mktemp("profile")) as browser:
        return {(page, width): browser.visit(address + page, width, SCRIPT) for page in pages for width in WIDTHS}


def test_no_page_is_wider_than_the_window(visits):
    assert not [visit for visit, seen in visits.items() if seen.value["overflow"] > 1]
    assert not {visit: seen.value["wide"] for visit, seen in visits.items() if seen.value["wide"]}


def test_no_page_has_an_error_or_a_failed_request(visits):
    assert not {visit: seen.problems for visit, seen in visits.items() if seen.problems}


def test_pages_ask_no_other_host(visits, address):
    own = (address, "data:", "blob:", "about:")
    assert not {request for seen in visits.values() for request in seen.requests if not request.startswith(own)}


def test_every_internal_link_leads_to_a_page_and_an_anchor(visits, site, address):
    anchors = {page: set(seen.value["anchors"]) for (page, _), seen in visits.items()}
    assert not {
        (page, link.removeprefix(address))
        for (page, _), seen in visits.items()
        for link in seen.value["links"]
        if link.startswith(address) and not resolves(link, anchors, site)
    }


def resolves(link: str, anchors: dict[str, set[str]], site: Path) -> bool:
    """Return whether the file and the anchor of a link exist. The anchors "" and "#" are the top of a page."""
    target, anchor = urldefrag(link)
    path = unquote(urlsplit(target).path).strip("/") or "index.html"
    if not (site / path).is_file():
        return False
    return not anchor or unquote(anchor) in anchors.get(path, ())


def test_a_wide_page_a_broken_script_and_a_missing_file_are_found(tmp_path):
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium or Chrome (Debian, Ubuntu: apt install chromium)")
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><body id=top><div style='width: 500px'>wide</div><a href='#gone'>link</a>"
        "<script src='gone.js'></script><script>fail()</script></body>",
        encoding="utf-8",
    )
    with open_browser(program, tmp_path / "profile") as browser:
        seen = browser.visit(page.as_uri(), 390, SCRIPT)
    assert seen.value["overflow"] > 1
    assert "wide" in seen.value["wide"][0]
    assert any("exception" in problem for problem in seen.problems)
    assert any("request failed" in problem for problem in seen.problems)
    assert not resolves("http://host/page.html#gone", {"page.html": set(seen.value["anchors"])}, tmp_path)
    assert resolves("http://host/page.html#top", {"page.html": set(seen.value["anchors"])}, tmp_path)
