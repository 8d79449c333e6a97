"""What can go wrong, told to the person who sees it: where, what, the limit, the remedy."""

from __future__ import annotations


class IntaglioError(Exception):
    """Base of every error intaglio raises on purpose.

    ``where`` is a module path, argument or file; ``operator`` an ATen operator (or ``None``);
    ``problem`` says what is wrong and the limit it broke; ``remedy`` what to do about it;
    ``source`` the line of the user's model, where one is known.
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


def _rebuild(
    kind: type[IntaglioError], where: str, operator: str | None, problem: str, fields: dict[str, str | None]
) -> IntaglioError:
    return kind(where, operator, problem, **fields)


class CaptureError(IntaglioError):
    """The model could not be turned into a graph, or the graph disagrees with the model."""


class UnsupportedError(IntaglioError):
    """Something the model or a recipe asks for cannot be expressed in int8."""


class SelectorError(IntaglioError):
    """A selector of a recipe matches nothing or cannot be read."""


class CalibrationError(IntaglioError):
    """The calibration data, or the ranges observed on it, cannot be used."""


class BuildError(IntaglioError):
    """Generated code could not be compiled or loaded."""


class InputError(IntaglioError):
    """A call with inputs that the model was not built for."""


class ArtifactError(IntaglioError):
    """A saved file is damaged, or from another version."""
