"""The picture of a network: no kernel covers another one, and lines lead from those that are read to their readers."""

from itertools import combinations

import pytest

from intaglio.lower.facts.operator_facts import OperatorFacts
from intaglio.reporting.pages.layout import (
    MARGIN,
    MOST_IN_A_BOX,
    NODE_HEIGHT,
    NODE_WIDTH,
    WIDTH,
    ModuleBox,
    edges_of,
    kernels_of,
    picture_of,
)
from intaglio.reporting.report_data import GraphReport, OperatorReport
from support import report_models


def chain(paths: list[str], extra: tuple[tuple[int, int], ...] = ()) -> GraphReport:
    """A graph in which each operator reads the one before it, and others read earlier ones too."""
    operators = []
    for index, path in enumerate(paths):
        reads = [f"n{index - 1}"] if index else []
        reads += [f"n{source}" for source, target in extra if target == index]
        operators.append(
            OperatorReport(f"{index} {path}", OperatorFacts(f"n{index}", path, "aten.op", reads=tuple(reads)))
        )
    return GraphReport("", tuple(operators))


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    (x, y, w, h), (x2, y2, w2, h2) = a, b
    return x < x2 + w2 and x2 < x + w and y < y2 + h2 and y2 < y + h


def assert_readable(boxes: tuple[ModuleBox, ...], width: float, height: float) -> None:
    frames = [(box.x, box.y, box.width, box.height) for box in boxes]
    assert not [pair for pair in combinations(frames, 2) if overlap(*pair)]
    for box in boxes:
        assert 0 <= box.x <= box.x + box.width <= width
        assert 0 <= box.y <= box.y + box.height <= height
        places = [(node.x, node.y, NODE_WIDTH, NODE_HEIGHT) for node in box.nodes]
        assert not [pair for pair in combinations(places, 2) if overlap(*pair)]
        assert all(x >= 0 and x + NODE_WIDTH <= box.width and y + NODE_HEIGHT <= box.height for x, y, _, _ in places)


@pytest.mark.parametrize(
    "graph",
    [
        chain(["stem", *(f"layers.{i}.{name}" for i in range(9) for name in ("a", "b", "c")), "head"]),
        chain([f"deep.deep.deep.{i // 40}.x{i}" for i in range(120)], extra=((0, 119), (3, 60), (4, 5))),
        chain(["", "", "a"]),
        chain(["a"]),
    ],
)
def test_nothing_covers_anything_else(graph):
    assert_nothing_is_covered(graph)


@pytest.mark.slow(reason="a report of a residual network; drawn graphs are laid out above")
def test_nothing_covers_anything_else_in_a_residual_network():
    assert_nothing_is_covered(report_models.residual_report().data.graphs[0])


def assert_nothing_is_covered(graph: GraphReport) -> None:
    picture = picture_of(graph, "Net")
    assert_readable(picture.boxes, picture.width, picture.height)
    assert picture.width <= WIDTH + MARGIN
    placed = [node.kernel.index for box in picture.boxes for node in box.nodes]
    assert sorted(placed) == sorted(kernel.index for kernel in kernels_of(graph))


def test_modules_of_one_depth_are_boxes():
    graph = chain(["stem", *(f"layers.{i}.{name}" for i in range(9) for name in ("a", "b", "c")), "head"])
    titles = [box.title for box in picture_of(graph, "Net").boxes]
    assert titles == ["stem", *(f"layers.{i}" for i in range(9)), "head"]


def test_single_kernels_beside_each_other_share_a_box():
    titles = [box.title for box in picture_of(chain(["conv", "pool", "a.x", "a.y", "fc"]), "Net").boxes]
    assert titles == ["conv, pool", "a", "fc"]


def test_operators_outside_of_modules_have_the_name_of_the_model():
    assert [box.title for box in picture_of(chain(["", ""]), "Net").boxes] == ["Net"]


def labels(paths):
    """Labels of a chain of kernels with these paths, which is one box."""
    (box,) = picture_of(chain(paths), "Net").boxes
    return [node.label for node in box.nodes]


def test_labels_are_short_and_not_only_a_number():
    assert labels(["layer1.0.conv1", "layer1.1.conv1", "layer1.1.bn"]) == ["0.conv1", "1.conv1", "bn"]
    assert labels(["layer1.0", "layer1.1"]) == ["0 op", "1 op"]
    found = labels(["a.0.a_projection_of_values", "a.1.a_projection_of_values", "a.the_longest_name_of_all"])
    assert found == ["0.…n_of_values", "1.…n_of_values", "the_longest_n…"]
    assert labels(["a.attention.output.dense", "a.output.dense"])[0] == "…output.dense"  # not an ellipsis and a dot


def test_large_modules_are_split():
    picture = picture_of(chain([f"a.{i // 4}.{i % 4}" for i in range(40)]), "Net")
    assert max(len(box.nodes) for box in picture.boxes) <= MOST_IN_A_BOX


def test_operators_of_a_kernel_are_one_node_and_edges_skip_views():
    (graph,) = report_models.residual_report().data.graphs
    kernels = kernels_of(graph)
    by_index = {kernel.index: kernel for kernel in kernels}
    names = [kernel.owner.facts.path for kernel in kernels]
    assert len(kernels) == len(graph.profile.parts)
    assert names[-2:] == ["pool", "fc"]
    edges = [(by_index[a].owner.facts.path, by_index[b].owner.facts.path) for a, b in edges_of(graph, kernels)]
    assert ("pool", "fc") in edges  # through the reshape between them
    assert ("stem.0", "blocks.0.conv2.0") in edges  # the shortcut
