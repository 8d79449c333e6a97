"""Every program of a segment is checked while define-by-run models run."""

from collections.abc import Iterator

import pytest

from intaglio.eager.segments import segment
from support.segment_programs import ProgramChecks


@pytest.fixture(autouse=True)
def segment_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgramChecks]:
    """Results of int8 segments have the bits of their references; `near` only sees that they are not nonsense."""
    checks = ProgramChecks()
    monkeypatch.setattr(segment, "build", checks)
    yield checks
    assert not checks.differing
