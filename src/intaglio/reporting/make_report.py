"""`report`: a page that shows what a quantized model costs in accuracy and time, operator by operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from intaglio.argument_checks import check_arguments, check_arguments_except, check_fields
from intaglio.errors import InputError
from intaglio.formatting.html_text import definition_list, element, html_table
from intaglio.output_paths import check_file, read_text, write_text
from intaglio.progress import shows_progress
from intaglio.quant.calibrate.batches import log_once
from intaglio.reporting.collect import Settings, collect
from intaglio.reporting.model_card import card_of
from intaglio.reporting.model_explorer import save_model_explorer
from intaglio.reporting.number_formats import gain_text
from intaglio.reporting.pages.page import page_of
from intaglio.reporting.pages.view import cards
from intaglio.reporting.report_data import ReportData
from intaglio.reporting.report_json import report_dict, report_from_json, report_json
from intaglio.reporting.suggestions import Trials


@check_fields
@dataclass(frozen=True)
class Report:
    """A report of a quantized model. Its page is one file that needs no other and opens in any browser.

    Attributes:
        data: everything that the page shows.
        other: the content of an earlier report, or of one about another model, to show beside it.
    """

    data: ReportData
    other: ReportData | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the content as a dictionary for JSON (docs/reference/formats.md, "Report")."""
        return report_dict(self.data)

    def to_json(self) -> str:
        """Return the content as JSON text, which `load` reads."""
        return report_json(self.data)

    def html(self) -> str:
        """Return the page as HTML. It makes no requests, and names of modules are escaped.

        Raises:
            InputError: jinja2 is not installed.
        """
        return page_of(self.data, self.other)

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Write the page to an HTML file.

        Raises:
            ArtifactError: the file cannot be written.
            InputError: jinja2 is not installed.
        """
        check_file(path)
        write_text(path, self.html())

    def card(self) -> str:
        """Return a model card as Markdown, to publish beside the model: what was quantized, with which recipe, how
        accurate it is on which data, and what it was measured with."""
        return card_of(self.data)

    @check_arguments
    def save_card(self, path: str | Path) -> None:
        """Write the model card to a Markdown file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        write_text(path, self.card())

    @check_arguments
    def save_json(self, path: str | Path) -> None:
        """Write the content to a JSON file.

        Raises:
            ArtifactError: the file cannot be written.
        """
        write_text(path, self.to_json())

    @check_arguments
    def save_model_explorer(self, folder: str | Path) -> list[Path]:
        """Write the graphs for Model Explorer, and for each measure a file that colours their nodes.

        Args:
            folder: the folder, which is created. ``graph.json`` is the model to open; the others are its node data.

        Returns:
            The files that were written.

        Raises:
            ArtifactError: a file cannot be written.
        """
        return save_model_explorer(self.data, folder)

    @staticmethod
    @check_arguments
    def load(path: str | Path) -> Report:
        """Return the report of a JSON file.

        Raises:
            ArtifactError: the file is not a report, or has another version.
        """
        return Report(report_from_json(read_text(path)))

    @check_arguments
    def beside(self, other: Report) -> Report:
        """Return the report with another one shown beside it: of another model, or of the same one before a change."""
        return Report(self.data, other.data)

    def _repr_html_(self) -> str:
        """Return the key figures and the changes that were tried, for notebooks. `save` writes the whole page."""
        figures = [(card.label, ", ".join(filter(None, (card.value, card.note)))) for card in cards(self.data, None)]
        tried = [(one.title, one.python, one.failure or gain_text(one.gain)) for one in self.data.suggestions]
        changes = html_table(("change", "to paste", "gain"), tried, text=2) if tried else ""
        limits = "".join(element("p", limit) for limit in self.data.limits)
        return element("p", repr(self)) + definition_list(figures) + changes + limits

    def __repr__(self) -> str:
        operators = sum(len(graph.operators) for graph in self.data.graphs)
        beside = f", beside {self.other.name}" if self.other is not None else ""
        return f"Report({self.data.name}: {operators} operators{beside})"


@check_arguments_except("model", "float_model")
@log_once()
@shows_progress("capture", "compare", "profile", "measure", "changes", only_if=lambda: True)
def report(
    float_model: nn.Module | None,
    model: Any,
    data: Any = None,
    *,
    samples: int | None = 64,
    calls: int = 20,
    tries: int = 3,
    against: Any = None,
    progress: bool | None = None,
) -> Report:
    """Measure what a quantized model costs in accuracy and time, operator by operator, for a page to look at.

    One pass over the data compares both models and counts the values of every operator. Then the program is timed on
    the first sample, alone and in alternation with the float model, and changes that may make the model more accurate
    are tried on the same samples.

    Args:
        float_model: the float model that was quantized, or ``None`` for a report without errors.
        model: the quantized model: what `quantize`, `load` or `eager.convert` returned.
        data: an iterable of batches as for `compare`, or ``None`` for a report without errors.
        samples: number of samples to compare (``None``: all).
        calls: number of timed calls, at most 100,000, and the largest number in each block of those in alternation with
            the float model; 0 measures no times.
        tries: number of operators that are left in float one at a time to see what it gains; 0 tries no changes.
        against: another quantized form of the same model, a `Report`, or the path of a report's JSON file, to show
            beside this one.
        progress: whether to show progress (default: on a terminal and in a notebook).

    Returns:
        The report. Its ``data`` holds the numbers of `compare`, `QuantizedModel.profile` and ``model.coverage``, and as
        ``measured`` the times beside those of the float model, as ``quantize(measure=True)`` measures them.

    Raises:
        InputError: the model is not a quantized one, or does not belong to the float model.

    Examples:
        >>> found = intaglio.report(model, int8, batches)
        >>> found.save("report.html")
    """
    if tries < 0:
        problem = f"tries = {tries}; it must not be negative"
        raise InputError("report", None, problem, remedy="pass 0 to try no changes")
    settings = Settings(samples, calls, speed=True)
    if against is None or isinstance(against, Report):
        other = against
    elif isinstance(against, (str, Path)):
        other = Report.load(against)
    else:
        batches = data if data is None or hasattr(data, "__len__") else list(data)
        data, other = batches, Report(collect(float_model, against, batches, settings).data)
    collection = collect(float_model, model, data, settings)
    trials = Trials.of(collection.runs.get("")) if tries else None
    tried = trials.for_model(tries) if trials is not None else ()
    found = Report(replace(collection.data, suggestions=tried))
    return found if other is None else found.beside(other)
