"""Errors for models of which no recording can be quantized."""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.eager.segments.segment import Segment
from intaglio.errors import CaptureError, UnsupportedError
from intaglio.quant.annotate.refusals import remedy_of_reasons

SAME_RESULTS = "its operators read no tensor that differs between calls"
PASS_TENSORS = "pass tensors to the model, or make them of numbers with torch.tensor(...) in its code"


def nothing_quantized_in(segments: Sequence[Segment]) -> UnsupportedError:
    """Return the error for a model that has only these recordings, with all reasons."""
    problem = "nothing in it can be quantized" if segments else "no operator was recorded"
    reasons = "; ".join(dict.fromkeys(s.error.problem if s.error else str(s.refused) for s in segments))
    remedies = [s.error.remedy for s in segments if isinstance(s.error, CaptureError) and s.error.remedy]
    if reasons == problem and not any(segment.recording.inputs for segment in segments):
        return UnsupportedError("model", None, f"{problem}: {SAME_RESULTS}", remedy=PASS_TENSORS)
    text = reasons if reasons.startswith(problem) else ": ".join(filter(None, (problem, reasons)))
    return UnsupportedError("model", None, text, remedy=remedies[0] if remedies else remedy_of_reasons(text))
