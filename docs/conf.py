"""Settings of Sphinx, which builds the documentation: `make docs` writes it to build/site."""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
# This folder has tables.py, notebook.py and parameter_tables.py; the package is documented from the sources beside it.
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import notebook
import tables
from sphinx.application import Sphinx

from intaglio.config import VERSION

project = "intaglio"
author = "The intaglio authors"
project_copyright = author
release = version = VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "parameter_tables",
]
exclude_patterns = ["_static"]
smartquotes = False

# -- pages ------------------------------------------------------------------------------------------------------------

TOP = (
    "Tutorial <tutorial>",
    "How-to guides <howto>",
    "Explanation <explanation>",
    "Reference <reference/index>",
)
"""The parts of the site, in the navigation bar. Each lists its own pages."""

# Headings can be linked by the names that code hosts give them, so that links work there too.
myst_heading_anchors = 4
highlight_language = "text"

# -- Python API -------------------------------------------------------------------------------------------------------

# Docstrings mark code with single backticks, which become links where a name is documented.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Types stand in the tables of parameters.
autodoc_typehints = "none"
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

# -- HTML -------------------------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = f"{project} {VERSION}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_context = {"default_mode": "auto"}
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_domain_indices = html_use_index = False
html_sidebars = {"index": [], "tutorial": []}
REPOSITORY = os.environ.get("INTAGLIO_REPOSITORY")
"""Shown in the header where it is given: ``INTAGLIO_REPOSITORY=address make docs``."""
html_theme_options = {
    "logo": {"text": html_title},
    "icon_links": [
        {"name": "Repository", "url": REPOSITORY, "icon": "fa-solid fa-code-branch"}
    ]
    if REPOSITORY
    else [],
    "navbar_align": "left",
    "show_toc_level": 2,
    "navigation_depth": 2,
    "show_prev_next": True,
    # Wide tables take the room of the table of contents.
    "secondary_sidebar_items": {
        "**": ["page-toc"],
        "reference/operators": [],
        "reference/fusions": [],
    },
    "footer_start": [],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# The text of a code block without prompts is what its button copies.
copybutton_exclude = ".linenos, .gp"


def on_source_read(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill in the tables of a page, the outputs of notebooks and the text of the benchmarks, and add the navigation to
    the first page.

    Code hosts show index.md as it is, so the navigation is not in it.
    """
    source[0] = (
        tables.benchmarks_page() if page == "benchmarks" else tables.fill(source[0])
    )
    if page.startswith("notebooks/"):
        run = (HERE / page).with_suffix(".ipynb").read_text(encoding="utf-8")
        source[0] = notebook.with_outputs(source[0], json.loads(run))
    if page == "index":
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *TOP, "```", ""])


def setup(app: Sphinx) -> None:
    app.connect("source-read", on_source_read)
