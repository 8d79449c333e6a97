"""The notebooks of the documentation: the same text and code as their pages, and they run."""

import importlib.util
import json
import os

import pytest

from support.output_pattern import output_pattern
from support.project_files import ROOT


def load_script():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()
PAGES = sorted(script.FOLDER.glob("*.md"))


def test_the_notebook_is_what_the_script_makes_of_the_page():
    made = script.notebook(script.PAGE.read_text(encoding="utf-8"))
    assert script.NOTEBOOK.read_text(encoding="utf-8") == made, "run: python docs/notebook.py"


def test_text_code_and_output_become_cells():
    cells = json.loads(script.notebook("# A\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\nEnd\n"))["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == [
        ("markdown", "# A"),
        ("code", "print(1)"),
        ("markdown", "End"),
    ]
    assert cells[1]["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["1"]}]


@pytest.fixture
def kernel(monkeypatch):
    """Let a kernel that the test starts find the package, and skip the test where there is no kernel."""
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name, reason="the notebook needs it; `make slow` installs it")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.slow(reason="runs the tutorial in a kernel of its own")
def test_the_notebook_runs(tmp_path, kernel):
    import nbclient
    import nbformat

    found = nbformat.read(script.NOTEBOOK, as_version=4)
    nbformat.validate(found)
    nbclient.NotebookClient(found, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "digits.intaglio").is_file()


# -- notebooks that were run ------------------------------------------------------------------------------------------


def stored(page):
    return json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
    """The kinds of a cell's outputs, the best form of each."""
    return [output["output_type"] if "text" in output else next(iter(output["data"])) for output in cell["outputs"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_that_was_run_has_the_text_and_code_of_its_page(page):
    made = json.loads(script.notebook(page.read_text(encoding="utf-8")))
    sources = [[(cell["cell_type"], cell["source"]) for cell in one["cells"]] for one in (made, stored(page))]
    assert sources[0] == sources[1], f"run: python docs/notebook.py {page.stem}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_that_was_run_has_tables_pictures_and_no_traces_of_a_machine(page):
    found = [kind for cell in code_cells(stored(page)) for kind in kinds(cell)]
    assert {"text/html", "image/png", "stream"} <= set(found)
    text = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert not [word for word in ("/tmp/", "/root/", "/home/", "ipykernel_", "Traceback", " at 0x") if word in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_the_page_says_is_printed_was_printed(page):
    cells, expected = code_cells(stored(page)), []
    for kind, body in script.parts(page.read_text(encoding="utf-8")):
        if kind == "python":
            expected.append(None)
        elif kind == "text":
            expected[-1] = body
    for cell, text in zip(cells, expected, strict=True):
        if text is not None:
            printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            assert output_pattern(text).fullmatch(printed.rstrip("\n") + "\n"), printed


@pytest.mark.slow(reason="trains and quantizes a model in a kernel for each notebook")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_with_outputs_of_the_same_kinds(page, kernel):
    done = script.run(page.read_text(encoding="utf-8"))
    assert [kinds(cell) for cell in code_cells(done)] == [kinds(cell) for cell in code_cells(stored(page))]


def test_outputs_stand_below_their_code_on_the_site():
    page = "# A\n\n```python\nx = 1\n```\n\n```python\nx\n```\n\n```text\nnot this\n```\n\nEnd\n"
    text = {"output_type": "stream", "name": "stdout", "text": ["one\n"]}
    table = {"output_type": "execute_result", "data": {"text/html": ["<table></table>"], "text/plain": ["T"]}}
    picture = {"output_type": "display_data", "data": {"image/png": "aGk=\n", "text/plain": ["F"]}}
    cells = [{"cell_type": "code", "outputs": [text]}, {"cell_type": "code", "outputs": [table, picture]}]
    made = script.with_outputs(page, {"cells": cells})
    assert "x = 1\n```\n\n```text\none\n```\n" in made
    assert script.html("<table></table>") in made
    assert 'src="data:image/png;base64,aGk="' in made
    assert "not this" not in made
    assert made.endswith("End\n")


def test_progress_warnings_and_addresses_are_not_kept():
    outputs = [
        {"output_type": "stream", "name": "stderr", "text": "warning"},
        {"output_type": "display_data", "data": {"text/plain": ""}},
        {"output_type": "display_data", "data": {"text/plain": "<A at 0x7f12>", "image/svg+xml": "<svg>"}},
    ]
    assert [script.kept(output) for output in outputs if script.is_kept(output)] == [
        {"output_type": "display_data", "data": {"text/plain": "<A>"}}
    ]
