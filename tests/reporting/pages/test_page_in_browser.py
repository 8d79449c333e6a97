"""Pages of reports in a browser: nothing overflows, fails or is asked for, keys work, and axe-core finds nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import report_models
from support.axe import NEEDED, check, find_axe
from support.chromium import Browser, find_chromium, open_browser

SCRIPT = """({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  wide: [...document.querySelectorAll("body *")]
    .filter(e => e.checkVisibility() && !e.closest(".map, .scroll, .skip, pre"))
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .slice(0, 3).map(e => e.outerHTML.slice(0, 120)),
  images: document.querySelectorAll("img, iframe, object").length,
})"""
CASES = {
    "residual": lambda: report_models.residual_report(),
    "beside": lambda: report_models.residual_report().beside(report_models.residual_report()),
    "islands": lambda: report_models.islands().report(tries=1),
    "parts": lambda: report_models.parts().report(),
    "define_by_run": lambda: report_models.define_by_run().report(),
    "nasty": lambda: report_models.nasty_report(),
}

pytestmark = pytest.mark.slow(reason="opens pages in Chromium")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, made in CASES.items():
        made().save(folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in CASES}


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("needs Chromium or Chrome (Debian, Ubuntu: apt install chromium)")
    with open_browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", CASES)
def test_a_page_fits_the_window_and_asks_for_nothing(browser, pages, name, scheme, width):
    browser.prefer(scheme)
    seen = browser.visit(pages[name].as_uri(), width, SCRIPT)
    assert seen.problems == []
    assert seen.requests == [pages[name].as_uri()]
    assert seen.value == {"overflow": 0, "wide": [], "images": 0}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", CASES)
def test_axe_finds_no_violation(browser, pages, name, scheme):
    source = find_axe()
    if source is None:
        pytest.skip(NEEDED)
    browser.prefer(scheme)
    script = check(source)
    assert browser.visit(pages[name].as_uri(), 1280, script).value == []
    for mode in "atp":
        browser.press(mode)
        assert browser.evaluate(script) == []
    browser.evaluate("document.querySelector('#ops .open').click()")
    assert browser.evaluate(script) == []


def test_a_key_changes_the_colours(browser, pages):
    browser.visit(pages["residual"].as_uri(), 1280, "1")
    for key in "atpe":
        browser.press(key)
        assert browser.evaluate("document.body.dataset.mode") == key
        assert browser.evaluate("document.querySelector('input[name=mode]:checked').value") == key
    browser.evaluate("document.querySelector('#search').focus()")
    browser.press("t")
    assert browser.evaluate("[document.body.dataset.mode, document.querySelector('#search').value]") == ["e", "t"]


def test_the_network_is_used_with_the_keyboard(browser, pages):
    browser.visit(pages["residual"].as_uri(), 1280, "document.querySelector('.k[tabindex=\"0\"]').focus()")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert browser.evaluate(focused).startswith("x: input")
    browser.press("ArrowDown")
    assert browser.evaluate(focused).startswith("stem.0: conv2d, relu; int8; own error")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.textContent") == "stem.0 + stem.1 (aten.conv2d.default)"
    assert browser.evaluate("!document.querySelector('#detail').hidden")
    pictures = browser.evaluate("[...document.querySelectorAll('#detail svg[role=img]')].map(e => e.ariaLabel)")
    assert "it is not quantized here" in pictures[0]
    assert "; range 0 to " in pictures[1]  # of the ReLU in the same kernel
    assert pictures[2].startswith("8 output channels, each channel")
    assert len(pictures) == 3
    browser.press("Escape")
    assert browser.evaluate("document.querySelector('#detail').hidden")
    assert browser.evaluate(focused).startswith("stem.0")
    browser.press("End")
    assert browser.evaluate(focused).startswith("fc: linear")


NAMES = """[...document.querySelectorAll('#ops tbody tr')].filter(row => !row.hidden)
  .map(row => row.querySelector('.open').textContent)"""


def test_the_table_is_sorted_and_searched(browser, pages):
    (graph,) = report_models.residual_report().data.graphs
    browser.visit(pages["residual"].as_uri(), 1280, "document.querySelector('[data-col=\"2\"]').click()")
    expected = [one.name for one in sorted(graph.operators, key=lambda one: one.row.alone)]
    assert browser.evaluate(NAMES)[:5] == expected[:5]
    assert browser.evaluate("document.querySelectorAll('#ops th')[2].getAttribute('aria-sort')") == "ascending"
    browser.evaluate("document.querySelector('[data-col=\"2\"]').click()")
    assert browser.evaluate(NAMES)[-5:] == expected[:5][::-1]
    browser.evaluate("document.querySelector('#search').focus()")
    for letter in "shortcut":
        browser.press(letter)
    kernel = graph.by_name["blocks.1.shortcut.0 + blocks.1.shortcut.1 (aten.conv2d.default)"]
    assert set(browser.evaluate(NAMES)) == {kernel.name, *kernel.fused}
    assert browser.evaluate("document.querySelector('#count').textContent") == "3 of 17 operators"


def test_a_link_opens_the_details_of_an_operator(browser, pages):
    browser.visit(pages["residual"].as_uri(), 1280, "location.hash = '#op3'")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    (graph,) = report_models.residual_report().data.graphs
    assert browser.evaluate("document.querySelector('#detail-h').textContent") == graph.operators[3].name


def test_names_run_no_code(browser, pages):
    seen = browser.visit(pages["nasty"].as_uri(), 1280, "document.querySelector('#ops .open').click()")
    assert seen.problems == []
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("document.querySelector('#detail-h').textContent") == f"0 {report_models.NASTY}"
