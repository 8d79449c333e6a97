"""Write the notebooks of pages: ``python docs/notebook.py``, and ``python docs/notebook.py vision`` runs one of them.

`tutorial.ipynb` is the tutorial as a notebook with the same text and code. The pages in `notebooks` are notebooks that
were run: the file beside each page has the outputs, and the site shows them below the code.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
FOLDER = Path(__file__).with_name("notebooks")
FENCE = re.compile(r"^```(python|text)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
SECONDS = 600
"""Largest number of seconds that a cell may take, also on a machine under load."""
SHOWN = ("text/html", "image/png", "text/plain")
"""Kinds of output that are kept, the best first."""
TRACES = (
    (re.compile(r" at 0x[0-9a-f]+"), ""),
    (re.compile(r"(/\S*?ipykernel_\d+/)?\b\d{6,}\.py"), "cell"),
)
"""Patterns of texts that differ in every run, and their replacements: addresses, and files that a kernel writes for its
cells."""


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
    return as_json(found)


def as_json(found: dict[str, Any]) -> str:
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


# -- notebooks that were run ------------------------------------------------------------------------------------------


def run(page: str) -> dict[str, Any]:
    """Return the notebook of a page with the outputs of its cells, run in a kernel and an empty folder of their own."""
    import nbclient
    import nbformat

    found = nbformat.reads(notebook(page), as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        nbclient.NotebookClient(found, timeout=SECONDS, resources=where).execute()
    for one in found.cells:
        one.metadata.clear()  # times of execution
        if one.cell_type == "code":
            one.outputs = [kept(output) for output in one.outputs if is_kept(output)]
    done = json.loads(nbformat.writes(found))
    done["metadata"]["language_info"] = {"name": "python"}
    return done


def is_kept(output: dict[str, Any]) -> bool:
    """Warnings are not part of the page, and neither is progress, which leaves an empty text."""
    if output["output_type"] == "stream":
        return output["name"] == "stdout"
    return bool("".join(output["data"].get("text/plain", "shown")).strip())


def kept(output: dict[str, Any]) -> dict[str, Any]:
    """The output in the best of its forms, and as text."""
    if "data" in output:
        best = next(kind for kind in SHOWN if kind in output["data"])
        data = {
            best: output["data"][best],
            "text/plain": output["data"].get("text/plain", ""),
        }
        output["data"] = {kind: cleaned(text) for kind, text in data.items()}
    else:
        output["text"] = cleaned(output["text"])
    return output


def cleaned(text: str) -> str:
    for trace, instead in TRACES:
        text = trace.sub(instead, text)
    return text


def with_outputs(page: str, found: dict[str, Any]) -> str:
    """Return the Markdown of a page for the site: below each block of Python the outputs of its cell."""
    cells = iter([one for one in found["cells"] if one["cell_type"] == "code"])
    made = []
    for kind, body in parts(page):
        if kind == "markdown":
            made.append(body)
        elif kind == "python":
            outputs = "".join(map(shown, next(cells)["outputs"]))
            made.append(f"```python\n{body}```\n{outputs}")
    return "".join(made)


def shown(output: dict[str, Any]) -> str:
    """Return one output as Markdown: text as a block, tables and pictures as HTML."""
    if output["output_type"] == "stream":
        return f"\n```text\n{''.join(output['text']).rstrip()}\n```\n"
    data = {kind: "".join(text) for kind, text in output["data"].items()}
    if "text/html" in data:
        return html(data["text/html"])
    if "image/png" in data:
        source = f"data:image/png;base64,{data['image/png'].strip()}"
        return html(f'<img alt="Plot that the code above draws" src="{source}">')
    return f"\n```text\n{data['text/plain'].rstrip()}\n```\n"


def html(body: str) -> str:
    """Return HTML as Markdown; what is wider than the page scrolls."""
    return f'\n```{{raw}} html\n<div class="output pst-scrollable-table-container">{body}</div>\n```\n'


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name in sys.argv[1:]:
        source = FOLDER / f"{name}.md"
        done = run(source.read_text(encoding="utf-8"))
        source.with_suffix(".ipynb").write_text(as_json(done), encoding="utf-8")
