"""Freed memory is kept in blocks that may be nested and may end with an error."""

import pytest

from intaglio.quant.calibrate import kept_memory
from intaglio.quant.calibrate.kept_memory import KEEPING_FREED, LEAST_MEMORY, RETURNING_FREED


class Library:
    """A C library that stores the calls that it gets."""

    def __init__(self):
        self.calls = []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))

    def malloc_trim(self, left):
        self.calls.append(("trim", left))


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(kept_memory, "_c_library", lambda: made)
    return made


def test_only_the_outermost_block_changes_the_allocator(library):
    @kept_memory.kept_memory()
    def inner():
        return len(library.calls)

    @kept_memory.kept_memory()
    def outer():
        assert inner() == inner() == len(KEEPING_FREED)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        outer()
    assert library.calls == [*KEEPING_FREED.items(), *RETURNING_FREED.items(), ("trim", 0)]


def test_blocks_within_others_can_return_memory(library):
    keeping, least, trimmed = [*KEEPING_FREED.items()], [*LEAST_MEMORY.items()], ("trim", 0)

    def inner():
        with kept_memory.returned_memory(), kept_memory.kept_memory():
            assert library.calls == [*keeping, *least, trimmed]
            raise ValueError("stop")

    with kept_memory.kept_memory():
        with pytest.raises(ValueError, match="stop"):
            inner()
        assert library.calls == [*keeping, *least, trimmed, *keeping]
    assert library.calls == [*keeping, *least, trimmed, *keeping, *RETURNING_FREED.items(), trimmed]
    library.calls.clear()
    with kept_memory.returned_memory():
        pass
    assert library.calls == [*least, *RETURNING_FREED.items()]


def test_other_c_libraries_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(kept_memory, "_c_library", lambda: None)
    with kept_memory.kept_memory(), kept_memory.returned_memory():
        pass
