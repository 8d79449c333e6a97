"""Graphs and node data for Model Explorer: nodes and edges belong together, and numbers are those of the report."""

import json

import pytest

from intaglio.errors import ArtifactError
from support import report_models

MADE = [report_models.residual, report_models.islands, report_models.parts]


@pytest.mark.parametrize("made", MADE)
def test_nodes_and_edges_of_a_graph_belong_together(made, tmp_path):
    found = made().report()
    files = found.save_model_explorer(tmp_path / "explorer")
    contents = {path.name: json.loads(path.read_text()) for path in files}
    graphs = {graph["id"]: graph for graph in contents.pop("graph.json")}
    assert list(graphs) == [graph.name or found.data.name for graph in found.data.graphs]
    for report, graph in zip(found.data.graphs, graphs.values(), strict=True):
        ids = [node["id"] for node in graph["nodes"]]
        assert len(set(ids)) == len(ids) == len(report.operators)
        assert {edge["sourceNodeId"] for node in graph["nodes"] for edge in node["incomingEdges"]} <= set(ids)
    assert set(contents) >= {"own_error_db.json", "error_so_far_db.json", "microseconds.json", "precision.json"}
    for content in contents.values():
        for name, of_graph in content.items():
            assert set(of_graph["results"]) <= {node["id"] for node in graphs[name]["nodes"]}


def test_values_are_those_of_the_report(tmp_path):
    found = report_models.residual_report()
    found.save_model_explorer(tmp_path)
    (graph,) = found.data.graphs
    times = json.loads((tmp_path / "microseconds.json").read_text())[found.data.name]["results"]
    types = json.loads((tmp_path / "precision.json").read_text())[found.data.name]["results"]
    for one in graph.operators:
        time = graph.microseconds(one)
        assert times.get(one.facts.node, {}).get("value") == (None if time is None else round(time, 1))
        assert types[one.facts.node]["value"] == str(one.facts.precision)


def test_modules_are_nested_layers_and_unknown_measures_have_no_file(tmp_path):
    found = report_models.residual().report(calls=0)
    names = [path.name for path in found.save_model_explorer(tmp_path)]
    assert "microseconds.json" not in names
    (graph,) = json.loads((tmp_path / "graph.json").read_text())
    (report,) = found.data.graphs
    assert [node["namespace"] for node in graph["nodes"]] == [
        one.facts.path.replace(".", "/") for one in report.operators
    ]


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArtifactError, match="taken"):
        report_models.residual_report().save_model_explorer(tmp_path / "taken")
