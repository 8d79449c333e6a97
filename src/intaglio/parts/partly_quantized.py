"""`PartlyQuantizedModel`: a float model some of whose submodules are int8 models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio import config
from intaglio.argument_checks import check_arguments
from intaglio.errors import InputError
from intaglio.formatting.html_text import element
from intaglio.output_paths import check_file
from intaglio.parts.call_recorder import recorded_calls
from intaglio.parts.capture_part import PartCandidate
from intaglio.parts.find_parts import FoundParts, calls_of
from intaglio.parts.part_module import QuantizedPart
from intaglio.parts.saved_parts import rest_of, write_parts
from intaglio.runtime import Coverage, QuantizedModel
from intaglio.runtime.reports.clipping import Clipping, ClippingMonitor
from intaglio.runtime.reports.speed import MeasuredSpeed
from intaglio.runtime.saved.fingerprints import fingerprint_of_programs
from intaglio.signature import clone_tensors
from intaglio.tracing.copies.copy_model import copy_with_parameters
from intaglio.tune import Comparison, ComparisonRun, run_comparison


class PartlyQuantizedModel(nn.Module):
    """A float model some of whose submodules are int8 models. It is called like the float model.

    `quantize` returns it for models that cannot be captured as a whole: their forward depends on values of tensors, as
    in detectors. Python code outside of the parts runs as it is. Attributes of the float model can be read.

    Attributes:
        model: a copy of the float model with `QuantizedModel` objects inside, in evaluation mode.
        parts: the int8 models by the path of the submodule that each replaces.
        coverage: the share of the whole model that runs in int8. Multiply-accumulates are those of the first batch.
        measured: its times beside those of the float model, if `quantize` measured them. Files do not keep them.
    """

    measured: MeasuredSpeed | None = None

    def __init__(self, model: nn.Module, coverage: Coverage) -> None:
        super().__init__()
        self.coverage = coverage
        self.model = model
        self._clipping = ClippingMonitor()
        for part in self.parts.values():
            part.share_clipping(self._clipping)
        self.eval()

    @property
    def parts(self) -> dict[str, QuantizedModel]:
        """Return the int8 models by the path of the submodule that each replaces."""
        return {path: part.int8 for path, part in self._part_modules().items()}

    def _part_modules(self) -> dict[str, QuantizedPart]:
        return {path: module for path, module in self.model.named_modules() if isinstance(module, QuantizedPart)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    @check_arguments
    def assert_int8(self, macs: float = 1.0) -> None:
        """Raise `AssertionError`, with the reasons, if less than this share of multiply-accumulates runs in int8."""
        self.coverage.assert_int8(macs)

    @property
    def clipping(self) -> Clipping:
        """Return which float values of all parts calls have had outside of their calibrated ranges, as
        `QuantizedModel` does."""
        return self._clipping.report()

    @property
    def on_clipping(self) -> str:
        """Return the policy for calls with values outside of their calibrated range, as of `QuantizedModel`."""
        return self._clipping.policy.value

    @on_clipping.setter
    def on_clipping(self, policy: str) -> None:
        self._clipping.set_policy(policy)

    @check_arguments
    def text(self, stage: str) -> str:
        """Return the texts of a stage of all parts, as `QuantizedModel.text` gives them."""
        return "\n".join(f"---- {path}\n{part.text(stage)}" for path, part in self.parts.items())

    @check_arguments
    def compare(self, float_model: nn.Module, data: Any, *, samples: int | None = None) -> dict[str, Comparison]:
        """Compare every part with its float submodule, on the arguments that it has in calls of the float model.

        Args:
            float_model: the float model that was quantized.
            data: an iterable of batches, as for `quantize`.
            samples: number of samples of each part after which to stop (default: all).

        Returns:
            The comparisons by path, as `intaglio.compare` makes them. Parts that no call reaches are left out.

        Raises:
            InputError: the model does not have the parts, or fails on a call.
        """
        return {path: run.comparison for path, run in self.part_runs(float_model, data, samples).items()}

    @check_arguments
    def part_runs(
        self, float_model: nn.Module, data: Any, samples: int | None, statistics: bool = False
    ) -> dict[str, ComparisonRun]:
        """Return for each part what `run_comparison` returns: the comparison, and what is known about its graph."""
        adapted = {path: part.adapted for path, part in self._part_modules().items() if part.adapted is not None}
        try:
            own = copy_with_parameters(float_model)  # the calls may change buffers
            modules = {path: own.get_submodule(path) for path in self.parts}
            calls = calls_of(own, data, None)
            with recorded_calls(modules, adapted) as logs, torch.no_grad():
                for args, kwargs in calls:
                    own(*clone_tensors(args), **clone_tensors(kwargs))
        except Exception as error:
            problem = f"the float model cannot be compared: {type(error).__name__}: {error}"
            raise InputError("compare", None, problem, remedy=FLOAT_MODEL_AND_BATCHES) from error
        found = {}
        for path, part in self.parts.items():
            if not logs[path].calls:
                continue
            one = PartCandidate.of(path, modules[path], logs[path], adapted.get(path))
            found[path] = run_comparison(one.captured, part, one.data(logs[path])[1], samples, statistics)
        return found

    def fingerprint(self) -> str:
        """Return the SHA-256 digest, as 64 hexadecimal digits, of the int8 parts and of the tensors of the float rest,
        as `QuantizedModel.fingerprint` does for one program. The Python code of the model does not count.

        Raises:
            ArtifactError: a float part of a program has no form that can be written.
        """
        programs = {path: part.fingerprint() for path, part in self.parts.items()}
        return fingerprint_of_programs(programs, rest_of(self.model))

    @check_arguments
    def save(self, path: str | Path, *, library: bool = True) -> None:
        """Write the int8 parts, and the tensors of the float rest, to one file for `intaglio.load_into`.

        The file holds no Python code. To load it, make a float model of the same architecture, whose weights may be
        random: ``intaglio.load_into(path, float_model)``.

        Args:
            path: the file.
            library: whether to store the compiled programs too, for loading with ``trust=True``.

        Raises:
            ArtifactError: the file cannot be written.
        """
        check_file(path)
        write_parts(Path(path), self.model, self._part_modules(), self.coverage, library, config.VERSION)

    def train(self, mode: bool = True) -> PartlyQuantizedModel:
        """Stay in evaluation mode, because int8 parts cannot be trained."""
        super().train(False)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model" or name.startswith("__"):
                raise
            if name in SAVING:
                raise AttributeError(f"a model in parts has no {name!r}: {SAVE_AND_LOAD}") from None
            return getattr(self.model, name)

    def __repr__(self) -> str:
        parts = ", ".join(self.parts)
        return f"PartlyQuantizedModel({type(self.model).__name__}: {self.coverage.macs_text} in int8, in {parts})"

    def _repr_html_(self) -> str:
        """Return the parts and the coverage for notebooks."""
        return element("p", repr(self)) + self.coverage._repr_html_()


SAVING = ("save_pretrained", "push_to_hub")
"""Methods of models of libraries that would write a folder without the weights of the parts."""
SAVE_AND_LOAD = "call its save(path), and intaglio.load_into(path, float_model)"
FLOAT_MODEL_AND_BATCHES = "pass the float model that was quantized, and batches as quantize takes them"


def coverage_of(model: nn.Module, found: FoundParts, size: int, refusal: str) -> Coverage:
    """Return the coverage of the whole model.

    Args:
        model: the model with its parts.
        found: the parts and what stays in float.
        size: bytes of the float model.
        refusal: why the whole model is not one program.
    """
    parts = {path: _scaled(part.int8.coverage, found.macs[path]) for path, part in found.parts.items()}
    own = list(parts.values())
    total = max(found.total, sum(part.macs_total for part in own))
    notes = [f"{path}: {note}" for path, part in parts.items() for note in part.notes]
    rest = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return Coverage(
        macs_int8=sum(part.macs_int8 for part in own),
        macs_total=total,
        operators_int8=sum(part.operators_int8 for part in own),
        operators_total=sum(part.operators_total for part in own),
        islands=sum(part.islands for part in own),
        floats=(*found.floats, *[one for part in own for one in part.floats]),
        bytes_before=size,
        bytes_after=rest + sum(part.bytes_after for part in own),
        notes=(parts_note(parts, total), f"the whole model is not one program: {refusal}", *notes),
        hosts=tuple(one for part in own for one in part.hosts),
        loops=tuple(one for part in own for one in part.loops),
    )


def parts_note(parts: Mapping[str, Coverage], total: int) -> str:
    """Return the sentence that names the parts."""
    shares = [
        f"{path} ({100 * part.macs_total / total:.1f} % of MACs)" if total else path for path, part in parts.items()
    ]
    return (
        f"the model runs in Python with {len(parts)} part{'s' * (len(parts) != 1)} in int8: {', '.join(shares)}; "
        "operators outside of them are not counted, and MACs are those of the first batch"
    )


def _scaled(coverage: Coverage, macs: int) -> Coverage:
    """Return the coverage of a part with the multiply-accumulates of the first batch instead of those of one sample."""
    if not coverage.macs_total:
        return coverage
    macs = max(macs, coverage.macs_total)

    def scaled(count: int) -> int:
        return count * macs // coverage.macs_total

    floats = tuple(replace(part, macs=scaled(part.macs)) for part in coverage.floats)
    return replace(coverage, macs_int8=scaled(coverage.macs_int8), macs_total=macs, floats=floats)
