"""What functions return has a short text of one line, and HTML for notebooks in which all text is escaped."""

import copy
import pickle
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import intaglio
from intaglio import eager, stages
from intaglio.runtime.reports.coverage import FloatPart
from intaglio.runtime.reports.speed import MeasuredSpeed, OperatorSpeed
from support import report_models
from support.report_models import NASTY

LONGEST = 200
"""Length of a line that is read at a glance."""
VOID = {"br", "img"}


class Page(HTMLParser):
    """Elements and text of HTML; every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@cache
def values() -> dict[str, Any]:
    """A value of each kind, of one small network."""
    case = report_models.residual()
    captured = stages.capture(case.exact, case.batches[0])
    prepared = stages.prepare(captured, stages.Quantizer(recipe=intaglio.Recipe.of({"fc": None})))
    ranges = stages.calibrate(prepared, case.batches, progress=False)
    reference = stages.convert(prepared, ranges)
    lowered = stages.requantize(reference)
    found = intaglio.search(case.exact, case.batches, evaluate=lambda model: 1.0, progress=False)
    return {
        "Captured": captured,
        "Prepared": prepared,
        "Ranges": ranges,
        "Reference": reference,
        "Lowered": lowered,
        "Planned": stages.plan(lowered),
        "Parameters": reference.parameters,
        "Corrections": stages.correct(prepared, ranges, case.batches),
        "QuantizedModel": case.quantized,
        "Coverage": case.quantized.coverage,
        "PartlyQuantizedModel": report_models.parts().quantized,
        "Comparison": intaglio.compare(case.exact, case.quantized, case.batches),
        "Profile": case.quantized.profile(case.batches[0], calls=1),
        "Recipe": found.recipe,
        "Setting": intaglio.Setting(method="minmax", bits=7),
        "SearchResult": found,
        "Report": report_models.residual_report(),
        "Explanation": intaglio.explain(report_models.residual_report(), "fc"),
        "Clipping": clipped(case.quantized, case.batches[0]),
        "MeasuredSpeed": measured_speed(),
        "Pool": measured_pool(case.quantized, case.batches[0]),
    }


def clipped(model: nn.Module, batch: torch.Tensor) -> Any:
    """Return the counts of clipped values after a call with values outside of the calibrated ranges."""
    own = copy.deepcopy(model)
    own.on_clipping = "ignore"
    own(100 * batch)
    return own.clipping


def measured_speed() -> MeasuredSpeed:
    """Times of a model with one operator that is slower in int8 and one that is faster."""
    slow = OperatorSpeed("stem (aten.conv2d.default)", "stem", (30.0,) * 4, (20.0,) * 4)
    fast = OperatorSpeed("fc (aten.linear.default)", "fc", (10.0,) * 4, (20.0,) * 4)
    return MeasuredSpeed(2, (50.0,) * 4, (100.0,) * 4, (fast, slow))


def measured_pool(model: nn.Module, batch: torch.Tensor) -> intaglio.Pool:
    """A pool that has measured every number of streams."""
    with intaglio.Pool.fastest(model, batch, seconds=0.01) as pool:
        return pool


STAGES = ("Captured", "Prepared", "Ranges", "Reference", "Lowered", "Planned", "Parameters", "Corrections")
MODELS = ("QuantizedModel", "Coverage", "PartlyQuantizedModel", "Recipe", "Setting")
NAMES = (
    *STAGES,
    *MODELS,
    "Comparison",
    "Profile",
    "SearchResult",
    "Report",
    "Explanation",
    "Clipping",
    "Pool",
    "MeasuredSpeed",
)
WITHOUT_HTML = ("Setting",)


@pytest.mark.parametrize("name", NAMES)
def test_a_repr_is_one_short_line(name):
    text = repr(values()[name])
    assert text.startswith(f"{name}(")
    assert text.endswith(")")
    assert len(text) <= LONGEST
    assert "\n" not in text


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_HTML])
def test_html_is_complete_and_begins_with_what_the_repr_says(name):
    value = values()[name]
    page = Page(value._repr_html_())
    assert "script" not in page.tags
    assert {"table", "details", "pre"} & set(page.tags)
    if name not in ("Coverage", "Comparison", "Profile", "SearchResult", "Explanation", "MeasuredSpeed"):
        assert repr(value) in page.text


def test_prepared_and_converted_models_of_eager_mode_show_their_recordings():
    case = report_models.define_by_run()
    prepared = eager.prepare(case.exact, case.batches[0])
    prepared(case.batches[0])
    for model, line in (
        (prepared, "Branching(prepared define-by-run: 1 recording, 1 call seen)"),
        (case.quantized, "Branching(converted define-by-run: 1 recording, 100.0 % of 320 MACs in int8)"),
    ):
        page = Page(model._repr_html_())
        assert "table" in page.tags
        assert page.text.startswith(line)
        assert repr(model._repr_html_) == line
        assert repr(model).startswith("Branching(\n")
    assert Page(eager.coverage(case.quantized)._repr_html_()).text in page.text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_eager_models_show_their_own_recordings(copied):
    case = report_models.define_by_run()
    other = copied(eager.prepare(case.exact, case.batches[0]))
    other(case.batches[0])
    assert "1 call seen" in Page(other._repr_html_()).text
    assert "converted define-by-run" in Page(eager.convert(other)._repr_html_()).text


def test_a_recording_that_stays_in_float_shows_why():
    prepared = eager.prepare(nn.Linear(16, 4), report_models.vectors()[0], {"*": None})
    assert "float: " in Page(prepared._repr_html_()).text


def test_html_of_a_models_own_class_stays():
    class Shown(nn.Linear):
        def _repr_html_(self):
            return "<p>mine</p>"

    assert eager.prepare(Shown(16, 4), report_models.vectors()[0])._repr_html_() == "<p>mine</p>"


def test_reprs_hold_the_numbers_of_their_values():
    found = values()
    assert repr(found["Ranges"]) == f"Ranges({len(found['Ranges'].statistics)} sites, 2 batches, 64 samples)"
    assert repr(found["Prepared"]).startswith("Prepared(Residual: ")
    assert "1 operators stay in float" not in repr(found["Prepared"])
    assert "1 operator stays in float" in repr(found["Prepared"])
    assert repr(found["Setting"]) == "Setting(method='minmax', bits=7)"
    assert repr(intaglio.Recipe()) == "Recipe()"
    recipe = intaglio.Recipe.of({f"layer{index}": None for index in range(5)}, intaglio.Setting(shortcut=16))
    shown = ", ".join(f"'layer{index}': Setting(quantize=False)" for index in range(3))
    assert repr(recipe) == f"Recipe({shown}, 2 more, default: Setting(shortcut=16))"
    coverage = found["Coverage"]
    operators = f"{coverage.operators_int8} of {coverage.operators_total} operators in int8"
    assert repr(coverage) == f"Coverage({coverage.macs_text} and {operators}, 0 float islands)"
    comparison = found["Comparison"]
    assert repr(comparison).startswith(f"Comparison({comparison.results[0]:.1f} dB over 64 samples, 17 operators")
    assert comparison.worst.name in repr(comparison)


def test_html_tables_have_the_numbers_of_their_values():
    found = values()
    comparison = Page(found["Comparison"]._repr_html_())
    assert comparison.tags.count("tr") == len(found["Comparison"].listed) + 1
    assert found["Comparison"].verdict in comparison.text
    for row in found["Comparison"].listed:
        assert f"{row.name}" in comparison.text
    profile = Page(found["Profile"]._repr_html_())
    assert all(f"{part.microseconds:.1f}" in profile.text for part in found["Profile"].parts)
    ranges = Page(found["Ranges"]._repr_html_())
    for name, statistics in found["Ranges"].statistics.items():
        assert f"{name}{statistics.low:.4g}{statistics.high:.4g}{statistics.count:,}" in ranges.text
    parameters = Page(found["Parameters"]._repr_html_())
    assert all(name in parameters.text for name in found["Parameters"].entries)
    corrections = Page(found["Corrections"]._repr_html_())
    assert found["Corrections"].steps
    assert all(
        f"{step.subject}{step.before:.1f}{step.after:.1f}" in corrections.text for step in found["Corrections"].steps
    )
    clipping = Page(found["Clipping"]._repr_html_())
    assert found["Clipping"].values
    assert all(f"{one.path or 'model'}{one.value}" in clipping.text for one in found["Clipping"].values)
    speed = Page(found["MeasuredSpeed"]._repr_html_())
    assert "stem (aten.conv2d.default)slower30.020.0" in speed.text
    assert "50.0 us per call in int8, 100.0 us in float, 2 threads: int8 is 2.00 times as fast" in speed.text
    pool = Page(found["Pool"]._repr_html_())
    assert all(f"{speed.latency_ms:.2f}" in pool.text for speed in found["Pool"].measured)
    lowered = Page(found["Lowered"]._repr_html_())
    assert "fcaten.linear.defaultthe recipe leaves it in float" in lowered.text
    assert found["Lowered"].text() in lowered.text
    assert found["Prepared"].annotations.sites_text() in Page(found["Prepared"]._repr_html_()).text


def test_operators_in_float_are_listed_by_reason():
    coverage = report_models.islands().quantized.coverage
    text = Page(coverage._repr_html_()).text
    for part in (*coverage.floats, *coverage.loops):
        assert f"{part.operator}{part.reason}" in text


def test_long_tables_are_cut():
    coverage = values()["Coverage"]
    many = tuple(FloatPart("a", f"aten.op{index}", "no kernel") for index in range(60))
    page = Page(replace(coverage, floats=many)._repr_html_())
    assert page.text.count("no kernel") == 50
    assert "10 more reasons" in page.text


def test_names_in_html_are_text():
    found = values()
    part = FloatPart(NASTY, NASTY, NASTY)
    coverage = replace(found["Coverage"], floats=(part,), loops=(part,), hosts=(part,), notes=(NASTY,))
    row = replace(found["Comparison"].rows[0], path=NASTY, operator=NASTY, source=NASTY, skip=NASTY)
    step = replace(found["Profile"].parts[0], name=NASTY, kinds=NASTY, kernel=NASTY)
    trial = replace(found["SearchResult"].chosen, assignment={NASTY: "float"})
    statistics = next(iter(found["Ranges"].statistics.values()))
    info = replace(found["Captured"].model_info, name=NASTY, notes=(NASTY,))
    nasty = (
        coverage,
        replace(found["Comparison"], rows=(row,)),
        replace(found["Profile"], parts=(step,)),
        replace(found["SearchResult"], trials=(trial,), chosen=trial),
        replace(found["Ranges"], statistics={NASTY: statistics}),
        intaglio.Recipe.of({"fc": None}).with_selection(skip=[NASTY]),
        *(replace(found[name], model_info=info) for name in ("Captured", "Prepared", "Reference", "Lowered")),
        report_models.nasty_report(),
    )
    for value in nasty:
        page = Page(value._repr_html_())
        assert not {"img", "script"} & set(page.tags)
        assert "onerror" in page.text


def test_a_model_without_matrix_products_has_html():
    class Sum(nn.Module):
        def forward(self, x):
            return x.relu() + 1

    captured = stages.capture(Sum(), report_models.vectors()[0])
    assert "inputs x" in repr(captured)
    assert Page(captured._repr_html_()).text
