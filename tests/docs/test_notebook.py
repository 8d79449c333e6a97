"""The tutorial as a notebook: the same text and code as the page, and it runs."""

import importlib.util
import json
import os

import pytest

from support.project_files import ROOT


def load_script():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


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


@pytest.mark.slow(reason="runs the tutorial in a kernel of its own")
def test_the_notebook_runs(tmp_path, monkeypatch):
    needs = "the notebook needs it; `make slow` installs it"
    nbformat, nbclient = (pytest.importorskip(name, reason=needs) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason=needs)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    found = nbformat.read(script.NOTEBOOK, as_version=4)
    nbformat.validate(found)
    nbclient.NotebookClient(found, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "digits.intaglio").is_file()
