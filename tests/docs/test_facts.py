"""Facts that pages state in tables and sentences are those of the code."""

import re
from dataclasses import fields

import pytest

from intaglio import config
from intaglio.ops import OPS
from intaglio.quant.calibrate.range_methods import METHODS
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import DEFAULT, TRANSFORMER, Setting
from intaglio.tune.schedule_search import MARGIN
from support.project_files import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def rows(name: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    _, _, text = page(name).partition(f"\n## {heading}\n")
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


SETTINGS = {
    name: cells[1] for cells in rows("reference/formats", "Recipe") for name in re.findall(r"`(\w+)`", cells[0])
}


def test_the_format_of_recipes_has_every_setting():
    assert sorted(SETTINGS) == sorted(field.name for field in fields(Setting))


@pytest.mark.parametrize(
    ("key", "value"), [(k, v) for k, cell in SETTINGS.items() for v in re.findall(r"`(.*?)`", cell)]
)
def test_a_recipe_takes_every_value_that_the_format_lists(key, value):
    assert getattr(Recipe.from_toml(f"[default]\n{key} = {value}").default, key) is not None


def test_pages_name_every_range_method():
    described = [re.match(r"`(\w+)", cells[0])[1] for cells in rows("calibration", "Methods")]
    assert sorted(described) == sorted(METHODS)
    assert set(re.findall(r'"(\w+)', SETTINGS["method"])) == set(METHODS)


def test_the_defaults_with_and_without_attention_are_those_of_the_page():
    text = page("transformers").partition("| setting | with attention | without |\n")[2].partition("\n\n")[0]
    table = [
        [re.search(r"`(.*?)`", cell)[1].strip('"') for cell in line.strip("|").split("|")]
        for line in text.splitlines()[1:]
    ]
    different = [
        field.name for field in fields(Setting) if getattr(DEFAULT, field.name) != getattr(TRANSFORMER, field.name)
    ]
    assert sorted(key for key, _, _ in table) == sorted(different)
    assert all((getattr(TRANSFORMER, key), getattr(DEFAULT, key)) == tuple(values) for key, *values in table)


def test_defaults_of_the_environment_are_those_of_the_page(monkeypatch):
    default = {cells[0].strip("`"): cells[2].strip("`") for cells in rows("deploying", "Caches and environment")}
    for name in default:
        monkeypatch.delenv(name, raising=False)
    assert config.cache_limit_bytes() == int(default["INTAGLIO_CACHE_MB"]) * 10**6
    assert config.max_plans() == int(default["INTAGLIO_PLANS"])
    assert f"Plans of the {config.max_plans()} most recently used" in page("shapes")


def test_the_promised_distance_to_the_reference_is_that_of_the_records():
    assert {record.name: record.tolerance for record in OPS.values() if record.tolerance != 1} == {"attention": 2}
    assert "differs by one quantized value at most (attention: by two)" in page("promises")


def test_the_functions_that_can_be_precise_are_listed():
    sentence = re.search(r"This is available for (.*?), if", page("recipes"), re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", sentence)) == {record.name for record in OPS.values() if record.precise}


def test_the_gain_for_which_a_schedule_is_taken_is_stated():
    assert f"takes at least {round(100 * (1 - MARGIN))} % less time" in page("slow")
