"""Exception classes. Every message says where the problem is, what it is, which limit it breaks and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IntaglioError(Exception):
    """Base class of all errors that intaglio raises on purpose.

    Attributes:
        where: module path, argument or file.
        operator: ATen operator, or ``None``.
        problem: what is wrong, and the limit that it breaks.
        remedy: what the user can do about it, or ``None``.
        source: line of the user's model, or ``None`` if it is not known.
    """

    def __init__(
        self, where: str, operator: str | None, problem: str, *, remedy: str | None = None, source: str | None = None
    ) -> None:
        self.where, self.operator, self.problem = where, operator, problem
        self.remedy, self.source = remedy, source
        super().__init__(self._text())

    def _text(self) -> str:
        head = self.where or "model"
        if self.operator:
            head += f" ({self.operator})"
        lines = [f"{head}: {self.problem}"]
        if self.source:
            lines.append(f"  at {self.source}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        fields = {"remedy": self.remedy, "source": self.source}
        return _rebuild, (type(self), self.where, self.operator, self.problem, fields)


MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
"""Python's exceptions for content of a file that does not have the expected form."""


INDEX_OUT_OF_RANGE = "index out of range in self"
"""PyTorch's message of the `IndexError` for ids outside of a table. Int8 models raise the same error."""


def _rebuild(
    kind: type[IntaglioError], where: str, operator: str | None, problem: str, fields: dict[str, str | None]
) -> IntaglioError:
    return kind(where, operator, problem, **fields)


class CaptureError(IntaglioError):
    """The model cannot be turned into a graph, or the graph disagrees with the model."""


class UnsupportedError(IntaglioError):
    """The model or the recipe asks for something that cannot be expressed in int8."""


class UnknownSizeError(UnsupportedError):
    """A value of the model has a size that depends on the values of its inputs."""


class SelectorError(IntaglioError):
    """A selector of a recipe matches nothing or is malformed."""


class CalibrationError(IntaglioError):
    """The calibration data, or the ranges observed on it, cannot be used."""


class NotFiniteError(CalibrationError):
    """A value of the model is NaN or infinite for the calibration data."""


class BuildError(IntaglioError):
    """Generated code cannot be compiled or loaded."""


class InputError(IntaglioError):
    """An argument or an input tensor does not fit the model."""


class ArtifactError(IntaglioError):
    """A saved file is damaged, cannot be written, or comes from another version."""


def did_you_mean(value: object, names: Iterable[object]) -> str | None:
    """Return the remedy for a misspelt name: the allowed name that begins with it, or else the nearest one. ``None`` if
    none of them is near."""
    text, known = str(value), [str(name) for name in names]
    longer = [name for name in known if text and name.startswith(text)]
    near = longer or difflib.get_close_matches(text, known, n=1)
    return f"did you mean {near[0]!r}?" if near else None
