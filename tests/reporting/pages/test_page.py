"""The page of a report: its numbers are those of the data, it makes no request, and nothing in it is injected."""

import base64
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import intaglio
from intaglio.errors import InputError
from intaglio.reporting.pages import page as page_module
from intaglio.reporting.pages.view import cards
from intaglio.runtime.reports.speed import MeasuredSpeed, OperatorSpeed
from support import report_models
from support.slow_params import slow_params

VOID = {"meta", "br", "input", "link", "img", "path", "rect"}


class Elements(HTMLParser):
    """Elements of a page with their attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = (tag, dict(attrs), [])
        self.found.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element[2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.found if name == tag]


@pytest.fixture(scope="module")
def html() -> str:
    return report_models.residual_report().html()


@pytest.fixture(scope="module")
def elements(html) -> Elements:
    return Elements(html)


def table_rows(elements: Elements) -> dict[str, list[str]]:
    """Texts of the cells of each operator, by its name."""
    found, name = {}, None
    for tag, attributes, text in elements.found:
        if tag == "tr":
            name = None
        elif tag == "button" and attributes.get("class") == "open":
            name = "".join(text)
            found[name] = []
        elif tag == "td" and name is not None:
            found[name].append("".join(text))
    return found


def test_errors_in_the_table_are_those_of_compare(elements):
    case, rows = report_models.residual(), table_rows(elements)
    for row in intaglio.compare(case.exact, case.quantized, case.batches).rows:
        cells = rows[row.name]
        assert cells[1] == ("exact" if row.alone == float("inf") else f"{row.alone:.1f}")
        assert cells[2] == ("exact" if row.so_far == float("inf") else f"{row.so_far:.1f}")
        if row.use is not None:
            assert cells[3] == f"{100 * (row.use.below + row.use.above):.2f} %"
            assert cells[4] == f"{100 * row.use.levels:.0f} %"


def test_times_in_the_table_are_those_of_the_profile(elements):
    (graph,) = report_models.residual_report().data.graphs
    rows = table_rows(elements)
    total = graph.profile.microseconds
    for step in graph.profile.parts:
        if step.macs:
            owner = next(one for one in graph.operators if step in graph.steps_of(one))
            cells = rows[owner.name]
            assert cells[5] == f"{step.microseconds:.1f} µs"
            assert cells[6] == f"{100 * step.microseconds / total:.1f} %"
            assert cells[7] == f"{100 * step.of_limit:.0f} %"


def test_key_figures_are_those_of_the_model(elements, html):
    case = report_models.residual()
    texts = elements.texts("dd")
    comparison = intaglio.compare(case.exact, case.quantized, case.batches)
    assert f"{comparison.results[0]:.1f} dB" in texts
    assert f"{100 * comparison.agreement:.1f} %" in texts
    assert f"{comparison.cosine:.5f}" in texts
    assert comparison.verdict[1:] in "".join(elements.texts("p"))
    assert str(case.quantized.coverage) in "".join(elements.texts("pre"))


def test_every_change_has_its_measured_error_and_a_line_to_paste(elements):
    data = report_models.residual_report().data
    assert "are those of the reference model" in "".join(elements.texts("p"))
    copied = {attributes["data-copy"] for _, attributes, _ in elements.found if "data-copy" in attributes}
    for one in data.suggestions:
        assert one.python in copied
        if not one.failure:
            assert f"{one.before:.1f} dB → {one.after:.1f} dB" in elements.texts("td")


@pytest.mark.parametrize(
    ("float32", "value", "note"),
    [
        ((845.0, 845.0), "8.45 times", "as fast: "),
        ((50.0, 50.0), "2.00 times", "as long, int8 is slower: "),
        ((200.0, 50.0), "As fast", "or the difference may be noise: "),
    ],
)
def test_the_card_of_the_speed_has_a_figure_that_fits_into_a_line(float32, value, note):
    data = replace(report_models.residual_report().data, measured=MeasuredSpeed(2, (100.0, 100.0), float32))
    (card,) = [card for card in cards(data, None) if card.label == "Beside the float model"]
    assert card.value == value
    assert card.note.startswith(note)


def test_the_speed_beside_float_and_what_loses_are_on_the_page():
    slow = OperatorSpeed("blocks.0 (aten.add.Tensor)", "blocks.0", (20.0, 20.0), (10.0, 10.0))
    measured = MeasuredSpeed(2, (100.0, 100.0), (250.0, 250.0), (slow,))
    data = replace(report_models.residual_report().data, measured=measured)
    elements = Elements(intaglio.Report(data).html())
    assert "2.50 times" in elements.texts("dd")
    assert "as fast: 100.0 µs a call in int8, 250.0 µs in PyTorch" in elements.texts("dd")
    assert [text for text in elements.texts("td") if text in ("20.0 µs", "10.0 µs")][:2] == ["20.0 µs", "10.0 µs"]
    assert "skip=['blocks.0']" in {a.get("data-copy") for _, a, _ in elements.found}
    quick = Elements(intaglio.Report(replace(data, measured=replace(measured, operators=(fast(slow),)))).html())
    assert "No operator took longer in the int8 model" in "".join(quick.texts("p"))


def fast(slow: OperatorSpeed) -> OperatorSpeed:
    return replace(slow, int8=slow.float32, float32=slow.int8)


def test_the_details_hold_every_operator(html):
    payload = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    (graph,) = report_models.residual_report().data.graphs
    assert [entry["n"] for entry in payload["ops"]] == [one.name for one in graph.operators]
    for entry, one in zip(payload["ops"], graph.operators, strict=True):
        assert entry["h"][2] == list(one.histogram.counts)
        assert ("w" in entry) == (one.weight is not None)


def test_the_details_of_a_kernel_show_its_quantized_result(html):
    payload = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    named = {entry["n"]: entry for entry in payload["ops"]}
    conv = named["blocks.0.conv2.0 + blocks.0.conv2.1 (aten.conv2d.default)"]
    relu = payload["ops"][conv["r"]]
    assert relu["n"] == "blocks.0 (aten.relu.default, call 2 of 2)"
    assert conv["h"][3] is None
    assert relu["h"][3] == 0
    assert "r" not in relu


def test_a_page_makes_no_request(html, elements):
    (policy,) = [a["content"] for tag, a, _ in elements.found if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    for tag in ("style", "script"):
        text = elements.texts(tag)[-1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    addresses = [a[key] for _, a, _ in elements.found for key in ("src", "href", "action", "data") if a.get(key)]
    assert all(address.startswith("#") for address in addresses)
    assert re.findall(r"url\((?!#)", html) == []
    assert not [a for _, a, _ in elements.found if "style" in a or any(key.startswith("on") for key in a)]


def test_identifiers_are_unique_and_labels_refer_to_them(elements):
    ids = [a["id"] for _, a, _ in elements.found if "id" in a]
    assert len(ids) == len(set(ids))
    labels = [a["aria-labelledby"] for _, a, _ in elements.found if "aria-labelledby" in a]
    assert set(labels) <= set(ids)
    assert all("scope" in a for tag, a, _ in elements.found if tag == "th")


def test_names_are_not_markup_or_code():
    html = report_models.nasty_report().html()
    assert "<img" not in html
    assert "49" not in re.findall(r"\{\{.*?\}\}", html)
    found = Elements(html)
    assert not [tag for tag, _, _ in found.found if tag == "img"]
    assert len([tag for tag, _, _ in found.found if tag == "script"]) == 2
    payload = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert payload["ops"][0]["n"] == f"0 {report_models.NASTY}"
    assert report_models.NASTY in found.texts("title")[0]


def test_another_report_adds_its_numbers():
    first = report_models.residual_report()
    html = first.beside(first).html()
    rows, alone = table_rows(Elements(html)), table_rows(Elements(first.html()))
    for name, cells in rows.items():
        assert cells[:9] == alone[name]
        assert cells[9] == (cells[1] or "–")
        assert cells[10] == (cells[2] or "–")


@pytest.mark.parametrize(
    "made",
    [
        report_models.islands,
        *slow_params(report_models.parts, reason="a report with the graphs of each part"),
        *slow_params(report_models.define_by_run, reason="a graph of another door, which an explanation shows, too"),
    ],
    ids=lambda made: made.__name__,
)
def test_every_kind_of_model_has_a_page(made):
    found = made().report()
    elements = Elements(found.html())
    names = ["".join(text) for tag, a, text in elements.found if tag == "button" and a.get("class") == "open"]
    assert names == [one.name for graph in found.data.graphs for one in graph.operators]
    for limit in found.data.limits:
        assert limit in elements.texts("li")


def test_a_report_without_data_has_a_page():
    found = intaglio.report(None, report_models.residual().quantized, calls=0)
    assert table_rows(Elements(found.html()))


def test_a_page_can_be_written_and_replaced(tmp_path):
    found = report_models.residual_report()
    found.save(tmp_path / "report.html")
    found.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == found.html()


def test_a_missing_package_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page_module.template.cache_clear()
    with pytest.raises(InputError, match=r"install it with pip install 'intaglio\[report\]'"):
        report_models.residual_report().html()
