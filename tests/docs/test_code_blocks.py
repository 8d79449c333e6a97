"""The Python blocks of README.md and of every page below docs run as they stand, those of one page in one namespace.

A ```text block is what the ```python block before it prints; ``…`` in it stands for anything, alone on a line for any
lines. A block titled "needs PACKAGE" stands on its own and is skipped where there is no such package.
"""

import contextlib
import io
import linecache
import logging
import re
import sys
import textwrap
import types
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.output_pattern import output_pattern
from support.processor import HAS_VNNI
from support.project_files import ROOT
from support.slow_params import slow_params_except
from support.torchvision_stub import import_torchvision

PAGES = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if path.parent.name != "notebooks"]
"""Pages whose blocks run here; notebooks run in a kernel (test_notebook.py)."""
LONG = (
    "calibration",
    "capture",
    "corrections",
    "define_by_run",
    "define_by_run_state",
    "deploying",
    "detectors",
    "generation",
    "guide",
    "inaccurate",
    "inductor",
    "migrate_onnxruntime",
    "migrate_openvino",
    "migrate_torch",
    "mixed_precision",
    "onnx",
    "patterns",
    "quantized_elsewhere",
    "quantizers",
    "recipes",
    "report",
    "shapes",
    "slow",
    "training",
    "transformers",
    "tutorial",
)
"""Pages whose blocks take seconds to run."""
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w+)(?P<title>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S)
NEEDS = re.compile(r'title="needs (\w+)"')


@dataclass
class Block:
    """``line``: where its code starts in the page. ``prints``: what stands in the page as its output."""

    line: int
    code: str
    needs: str | None = None
    prints: str | None = None


def python_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    for fence in FENCE.finditer(text):
        line, body = text.count("\n", 0, fence.start("body")) + 1, textwrap.dedent(fence["body"])
        if fence["kind"] == "python":
            title = NEEDS.search(fence["title"])
            blocks.append(Block(line, body, title[1] if title else None))
        elif fence["kind"] == "text":
            assert blocks, f"{page.name}:{line}: no block stands before this output"
            assert blocks[-1].prints is None, f"{page.name}:{line}: a second output of one block"
            blocks[-1].prints = body
    return blocks


def run_block(page: Path, block: Block, namespace: dict) -> None:
    printed = io.StringIO()
    try:
        # Newlines in front: tracebacks, and the source lines torch records, are those of the page; under another
        # name, as torch reads a file of the page's own as Python.
        lines, name = page.read_text(encoding="utf-8").splitlines(keepends=True), f"<{page}>"
        linecache.cache[name] = (len(lines), None, lines, name)
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    except Exception as error:
        raise AssertionError(f"{page.name}:{block.line}: this block fails with {error!r}") from error
    if block.prints is not None and not output_pattern(block.prints).fullmatch(printed.getvalue().rstrip("\n") + "\n"):
        raise AssertionError(
            f"{page.name}:{block.line}: this block prints\n\n{printed.getvalue()}\n    and not\n\n{block.prints}"
        )


def run_blocks(page: Path, namespace: dict) -> None:
    for block in python_blocks(page):
        if block.needs is None:
            run_block(page, block, namespace)


@pytest.fixture
def page_module(monkeypatch, tmp_path):
    """A module the blocks live in, so that their classes can be pickled; the working directory is empty. What a page
    does to the logger ends with it."""
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("intaglio")
    level = logger.level
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    yield module
    logger.setLevel(level)


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


ALONE = [(page, block) for page in PAGES for block in python_blocks(page) if block.needs]


@pytest.mark.case("problem 40")
@pytest.mark.parametrize(
    "page",
    slow_params_except(
        *(page for page in PAGES if page.stem not in LONG), of=PAGES, reason="takes seconds; run `make slow`"
    ),
    ids=page_name,
)
def test_python_blocks_run_and_print_what_the_page_says(page, page_module):
    if page.name == "inductor.md" and not HAS_VNNI:
        pytest.skip("without VNNI oneDNN's int8 kernels saturate in 16 bits, so results differ from the page")
    run_blocks(page, vars(page_module))


@pytest.mark.slow(reason="blocks that need large packages; the pages change rarely")
@pytest.mark.parametrize(("page", "block"), ALONE, ids=[f"{page_name(page)}:{block.line}" for page, block in ALONE])
def test_code_blocks_may_require_another_package(page, block, page_module):
    if find_spec(block.needs) is None:
        pytest.skip(f"{page.name}:{block.line} needs {block.needs}, which is not installed")
    if block.needs in ("torchvision", "transformers", "ultralytics") and find_spec("torchvision") is not None:
        import_torchvision()  # transformers imports it where it is installed
    run_block(page, block, vars(page_module))


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_a_failing_block_is_named_by_its_line(tmp_path, page_module):
    page = written(tmp_path, "# A\n\n```python\nx = 1\n```\n\n1. in a list\n\n   ```python\n   assert x == 2\n   ```\n")
    with pytest.raises(AssertionError, match=re.escape("page.md:10: this block fails with AssertionError()")):
        run_blocks(page, vars(page_module))


def test_output_that_differs_from_the_page_is_shown(tmp_path, page_module):
    page = written(tmp_path, "```python\nprint('scale', 0.5)\n```\n\nprints\n\n```text\nscale 0.25\n```\n")
    with pytest.raises(AssertionError, match=re.escape("page.md:2: this block prints\n\nscale 0.5")):
        run_blocks(page, vars(page_module))


@pytest.mark.parametrize(
    ("output", "fits"),
    [("a 1\nb 2", True), ("a …\nb …", True), ("…\nb 2", True), ("a 1\n…", True), ("a 1", False), ("b 2", False)],
)
def test_an_ellipsis_in_expected_output_matches_anything(output, fits):
    assert bool(output_pattern(output).fullmatch("a 1\nb 2\n")) is fits


def test_a_block_with_a_needed_package_is_left_out_of_its_page(tmp_path, page_module):
    page = written(tmp_path, '```python title="needs nothing_of_this_name"\nimport nothing_of_this_name\n```\n')
    run_blocks(page, vars(page_module))
    assert [block.needs for block in python_blocks(page)] == ["nothing_of_this_name"]
