"""Plots show the numbers of the values they belong to, on axes of the caller or on new ones."""

import sys

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from support import report_models

mpl.use("Agg")


@pytest.fixture(scope="module")
def case():
    return report_models.residual()


@pytest.fixture(scope="module")
def compared(case):
    return intaglio.compare(case.exact, case.quantized, case.batches)


@pytest.fixture(scope="module")
def ranges(case):
    prepared = stages.prepare(stages.capture(case.exact, case.batches[0]))
    return stages.calibrate(prepared, case.batches)


def lengths(axes):
    return [bar.get_width() for bar in axes.patches]


def test_a_comparison_draws_its_worst_operators(compared):
    axes = compared.plot(Figure().subplots(), most=3)
    assert lengths(axes) == [row.alone for row in compared.listed[:3]]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.name for row in compared.listed[:3]]
    assert "dB" in axes.get_xlabel()


def test_a_profile_draws_its_slowest_steps(case):
    profile = case.quantized.profile(case.batches[0])
    axes = profile.plot(Figure().subplots())
    assert lengths(axes) == [part.microseconds for part in profile.worst(30)]
    assert axes.get_title() == repr(profile)


def test_ranges_draw_the_histogram_of_a_site(ranges):
    site, statistics = next(iter(ranges.statistics.items()))
    axes = ranges.plot(site, Figure().subplots(), method="minmax")
    assert sum(bar.get_height() for bar in axes.patches) == statistics.finite
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([statistics.low, statistics.high])
    assert len(axes.patches) <= 128


def test_plots_make_axes_of_their_own_that_can_be_saved(compared, ranges, tmp_path):
    for name, axes in {"compared": compared.plot(), "ranges": ranges.plot(next(iter(ranges.statistics)))}.items():
        axes.figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        mpl.pyplot.close(axes.figure)


@pytest.mark.parametrize(
    ("site", "method", "said"),
    [("nowhere", "mse", "the ranges have no site 'nowhere'"), (None, "median", "unknown method 'median'")],
)
def test_unknown_sites_and_methods_are_named(ranges, site, method, said):
    with pytest.raises(InputError, match=said):
        ranges.plot(site or next(iter(ranges.statistics)), method=method)


def test_without_matplotlib_the_error_says_what_to_install(compared, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'intaglio\[plot\]'"):
        compared.plot()
