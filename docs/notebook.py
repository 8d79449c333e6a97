"""Write `tutorial.ipynb`, the tutorial as a notebook with the same text and code: ``python docs/notebook.py``."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
FENCE = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> str:
    """Return the notebook of a page: a cell for each block of Python and each text between them.

    A block of the kind ``text`` is the output of the cell before it.
    """
    cells: list[dict[str, Any]] = []
    for kind, body in parts(page):
        if kind == "text":
            cells[-1]["outputs"] = [
                {"name": "stdout", "output_type": "stream", "text": lines(body)}
            ]
        elif body.strip():
            cells.append(cell(kind, body, len(cells) + 1))
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": python, "language_info": {"name": "python"}}
    found = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, ensure_ascii=False, indent=1) + "\n"


def parts(page: str) -> Iterator[tuple[str, str]]:
    end = 0
    for fence in FENCE.finditer(page):
        yield "markdown", page[end : fence.start()]
        yield fence[1], fence[2]
        end = fence.end()
    yield "markdown", page[end:]


def cell(kind: str, body: str, number: int) -> dict[str, Any]:
    source = {"id": f"cell-{number}", "metadata": {}, "source": lines(body)}
    if kind == "markdown":
        return {"cell_type": "markdown", **source}
    return {"cell_type": "code", "execution_count": None, **source, "outputs": []}


def lines(body: str) -> list[str]:
    return body.strip("\n").splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
