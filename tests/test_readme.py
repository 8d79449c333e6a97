"""The Python blocks of README.md and docs/*.md run as they stand, those of one page in one namespace."""

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if path.exists()]
BLOCK = re.compile(r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line its code starts on, code) of each ```python block, in order."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start("code")) + 1, textwrap.dedent(m["code"])) for m in BLOCK.finditer(text)]


def run_blocks(page: Path, namespace: dict) -> None:
    for line, code in python_blocks(page):
        try:
            # Newlines in front: tracebacks, and the source lines torch records, are those of the page.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
        except Exception as error:
            raise AssertionError(f"{page.name}:{line}: this block fails with {error!r}") from error


@pytest.fixture
def page_module(monkeypatch, tmp_path):
    """A module the blocks live in, so that their classes can be pickled; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, page_module):
    run_blocks(page, vars(page_module))


def test_a_failing_block_is_named_by_its_line(tmp_path, page_module):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n1. in a list\n\n   ```python\n   assert x == 2\n   ```\n")
    with pytest.raises(AssertionError, match=re.escape("page.md:10: this block fails with AssertionError()")):
        run_blocks(page, vars(page_module))
