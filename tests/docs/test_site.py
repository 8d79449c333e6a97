"""The site: tables printed from the code are complete, and pages name what exists."""

import importlib.util
import inspect
import os
import re
from pathlib import Path

import pytest
import typer

import intaglio
import intaglio.annotation
import intaglio.calibration
import intaglio.patterns
from intaglio import config, errors
from intaglio.cli.app import app
from intaglio.fusion.pattern import op, seq, wildcard
from intaglio.fusion.table import FUSIONS, GRAPH_FUSIONS
from intaglio.kernels import ISAS
from intaglio.ops import OPS
from support.project_files import ROOT

DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("**/*.md"))}
WRITTEN = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(DOCS / name for name in PAGES)]
FENCE = re.compile(r"^ *```([\w{}-]*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def load_tables():
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load_tables()


def rows(text: str) -> list[list[str]]:
    """Cells of a table below its head; every row is as long as the head."""
    head, line, *body = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()]
    assert set(line) == {"---"}
    assert {len(row) for row in (line, *body)} == {len(head)}
    return body


def names(text: str) -> list[str]:
    return [row[0].strip("`") for row in rows(text)]


# -- tables -----------------------------------------------------------------------------------------------------------


def test_every_operator_is_in_one_table():
    assert sorted([*names(tables.operators()), *names(tables.internal())]) == sorted(OPS)


@pytest.mark.parametrize("record", [r for r in OPS.values() if r.targets], ids=lambda record: record.name)
def test_documented_operator_rows_match_their_records(record):
    (row,) = [row for row in rows(tables.operators()) if row[0] == f"`{record.name}`"]
    _, overloads, owner, kernel, fused, notes = row
    assert re.findall(r"`(.*?)`", overloads) == list(record.targets)
    assert owner == ("its input's" if record.shares_qparams else "its own")
    assert kernel == (record.kernel or "host")
    assert ("256" in notes) is (record.function is not None)
    wanted = [
        name for name, pattern in ((r.name, r.pattern) for r in GRAPH_FUSIONS) if repr(record.name) in repr(pattern)
    ]
    assert re.findall(r"`(.*?)`", fused) == wanted


def test_every_fusion_row_is_in_the_order_it_is_tried():
    assert names(tables.fusions()) == [row.name for row in FUSIONS]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (seq("conv2d", "clamp"), "clamp(conv2d(x))"),
        (op("add", op(("conv2d", "linear"), wildcard("x")), wildcard()), "add(conv2d / linear(x), any)"),
        (op("clamp"), "clamp(…)"),
    ],
)
def test_a_pattern_is_printed_as_calls(pattern, text):
    assert tables.text(pattern) == text


def test_every_error_has_a_row_with_its_first_line():
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.IntaglioError)]
    wanted = {c.__name__: inspect.getdoc(c).splitlines()[0] for c in found}
    assert {row[0].strip("`"): row[1] for row in rows(tables.error_classes())} == wanted


def test_every_instruction_set_has_a_row_with_all_its_kernels():
    assert names(tables.kernels()) == list(ISAS)
    for isa, row in zip(ISAS.values(), rows(tables.kernels()), strict=True):
        specs = set(isa.specs())
        assert int(row[2]) == len(specs)
        max_tile_rows = {(spec.rows, 16 * spec.blocks) for spec in specs if spec.rows == isa.max_tile_rows[spec.blocks]}
        assert {tuple(map(int, tile.split(" × "))) for tile in row[3].split(", ")} == max_tile_rows
        assert set(re.findall(r"`(.*?)`", row[4])) == {spec.result for spec in specs}


def test_every_generated_table_is_on_a_page_and_every_marker_names_a_table():
    assert sorted(mark for text in PAGES.values() for mark in tables.MARK.findall(text)) == sorted(tables.TABLES)
    for text in PAGES.values():
        assert not tables.MARK.search(tables.fill(text))
    with pytest.raises(KeyError):
        tables.fill("{{ operatorz }}")


# -- pages ------------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation():
    """Sphinx adds the four parts to the first page; each part lists its own pages."""
    conf = (DOCS / "conf.py").read_text(encoding="utf-8")
    listed = re.findall(r"<(\S+)>", re.search(r"^TOP = \((.*?)\)$", conf, re.MULTILINE | re.DOTALL)[1])
    for part in ("howto.md", "explanation.md", "reference/index.md"):
        for block in re.findall(r"^```{toctree}\n(.*?)^```$", PAGES[part], re.MULTILINE | re.DOTALL):
            targets = re.findall(r"<(\S+)>$", block, re.MULTILINE)
            listed += [os.path.normpath(Path(part).parent / target) for target in targets]
    assert sorted(f"{name}.md" for name in listed) == sorted(set(PAGES) - {"index.md"})


def test_links_of_the_benchmarks_page_lead_to_pages_of_the_site():
    text = tables.benchmarks_page()
    assert "](images/speed.svg)" in text
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))]
    assert [link for link in links if link and not (DOCS / link).is_file()] == []


def broken_links(page: Path) -> list[str]:
    """Relative links to files and headings that are not there."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target == DOCS / "benchmarks.md":
            target = tables.BENCHMARKS
        if "://" in link:
            continue
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def anchors(page: Path) -> set[str]:
    """Headings as Sphinx and code hosts both name them: lower case, hyphens for spaces, signs dropped."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title in titles}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Here it is\n[a](#here-it-is) [b](#nowhere) [c](gone.md) [d](page.md#here-it-is)\n")
    assert broken_links(page) == ["#nowhere", "gone.md"]


@pytest.mark.slow(reason="Sphinx renders all pages; links, tables and names are checked without it")
def test_the_site_builds_without_a_warning(site):
    reference = (site / "reference" / "operators.html").read_text(encoding="utf-8")
    assert all(f">{name}</span></code>" in reference for name in OPS)


def documented_names() -> dict[str, str]:
    """Return every documented name, with its module, and the page that documents it."""
    found = {}
    for page, text in PAGES.items():
        module = ""
        for kind, name in re.findall(r"^\.\. (currentmodule|autofunction|autoclass):: ([\w.]+)$", text, re.MULTILINE):
            if kind == "currentmodule":
                module = name
            else:
                path = name if "." in name else f"{module}.{name}"
                assert path not in found, f"{path} is on {found[path]} and on {page}"
                found[path] = page
    return found


DOCUMENTED = documented_names()
HOMES = (intaglio, intaglio.stages, intaglio.calibration, intaglio.patterns, intaglio.annotation, intaglio.eager)


def find(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_in_the_reference():
    documented = [find(path) for path in DOCUMENTED]
    for home in HOMES:
        modules = {name for name in home.__all__ if inspect.ismodule(getattr(home, name))}
        for name in set(home.__all__) - modules - {"BUILT_IN"}:
            assert any(getattr(home, name) is thing for thing in documented), f"{home.__name__}.{name}"


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_name_is_what_the_package_exports(path):
    found, name = find(path), path.rpartition(".")[2]
    assert inspect.getdoc(found)
    if any(home.__dict__.get(name) is found for home in HOMES):
        assert path.rpartition(".")[0] in {home.__name__ for home in HOMES}


def test_public_functions_describe_every_parameter():
    functions = {path: thing for path in DOCUMENTED if inspect.isroutine(thing := find(path))}
    assert functions
    for path, function in functions.items():
        described = re.findall(r"^ {4}\*{0,2}(\w+):", inspect.getdoc(function), re.MULTILINE)
        assert set(inspect.signature(function).parameters) <= set(described), path


@pytest.mark.slow(reason="Sphinx renders all pages")
def test_every_parameter_of_a_public_function_is_in_a_table(site):
    for path, page in DOCUMENTED.items():
        if inspect.isroutine(find(path)):
            text = (site / page).with_suffix(".html").read_text(encoding="utf-8")
            _, _, text = text.partition(f'<dt class="sig sig-object py" id="{path}">')
            rows, _, _ = text.partition("</table>")
            for name in inspect.signature(find(path)).parameters:
                assert re.search(rf'<code class="name [^>]*><span class="pre">\**{name}</span></code>', rows), path


def test_every_variable_of_the_environment_is_described():
    read = re.findall(r'(?:environ(?:\.get\(|\[)|_number\()"(\w+)"', inspect.getsource(config))
    described = re.findall(r"^\| `(\w+)` \|", PAGES["deploying.md"], re.MULTILINE)
    assert sorted(set(read) - {"XDG_CACHE_HOME"}) == sorted(described)


# -- command line -----------------------------------------------------------------------------------------------------

COMMANDS = typer.main.get_command(app).commands
SHELL = [body for text in PAGES.values() for kind, body in FENCE.findall(text) if not kind]
LINES = sorted({line for block in SHELL for line in block.splitlines() if line.startswith("intaglio ")})


def options(command: str) -> set[str]:
    return {name for option in COMMANDS[command].params for name in option.opts}


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_the_pages_has_options_that_exist(line):
    _, command, *words = line.split()
    assert {word for word in words if word.startswith("--")} <= options(command)


def test_every_command_is_documented():
    assert {line.split()[1] for line in LINES} <= set(COMMANDS)
    described = re.findall(r"^\| `intaglio ([\w-]+)` \|", PAGES["cli.md"], re.MULTILINE)
    assert sorted(described) == sorted(COMMANDS)
