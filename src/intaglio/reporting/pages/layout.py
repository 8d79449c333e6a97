"""Layout of a network as boxes of modules, which hold kernels in rows and lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from intaglio.reporting.report_data import GraphReport, OperatorReport

MOST_IN_A_BOX = 16
"""Kernels that a module may have to be one box; larger modules are split into their submodules."""
DEEPEST = 12
"""Largest depth of modules that are boxes."""
WIDTH = 1180
"""Width of the picture; boxes that do not fit go to the next row."""
NODE_WIDTH, NODE_HEIGHT = 104, 24
COLUMN_GAP, ROW_GAP = 14, 12
PADDING, TITLE = 10, 20
BOX_GAP, SHELF_GAP, MARGIN = 26, 40, 24
LONGEST_TITLE, LONGEST_LABEL = 40, 14
TRACKS = 5
"""Number of lines beside each other that connections between boxes take, before they share one."""


@dataclass(frozen=True)
class Kernel:
    """Operators that run as one kernel, or a single operator.

    Attributes:
        index: position of its main operator among those of the graph.
        owner: the main operator.
        members: positions of all its operators.
    """

    index: int
    owner: OperatorReport
    members: tuple[int, ...]


@dataclass
class PlacedKernel:
    """A kernel in the picture.

    Attributes:
        kernel: the kernel.
        label: name inside of its box.
        x: left end.
        y: upper end.
    """

    kernel: Kernel
    label: str
    x: float = 0
    y: float = 0


@dataclass
class ModuleBox:
    """A module in the picture.

    Attributes:
        title: path of the module.
        nodes: its kernels.
        links: lines between them as paths of SVG.
        x: left end.
        y: upper end.
        width: width.
        height: height.
    """

    title: str
    nodes: list[PlacedKernel]
    links: list[str] = field(default_factory=list)
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0


@dataclass(frozen=True)
class NetworkPicture:
    """The picture of a graph.

    Attributes:
        boxes: its modules.
        routes: lines between them as paths of SVG.
        edges: pairs of kernels, by the position of their main operators.
        width: width of the picture.
        height: height of the picture.
    """

    boxes: tuple[ModuleBox, ...]
    routes: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    width: float
    height: float


def kernels_of(graph: GraphReport) -> tuple[Kernel, ...]:
    """Return the kernels of a graph in execution order. Operators whose results are views are left out."""
    members: dict[str, list[int]] = {}
    for index, one in enumerate(graph.operators):
        if not one.is_view:
            members.setdefault(one.counted_with or one.name, []).append(index)
    places = {one.name: index for index, one in enumerate(graph.operators)}
    found = [Kernel(places[name], graph.operators[places[name]], tuple(own)) for name, own in members.items()]
    return tuple(sorted(found, key=lambda kernel: kernel.members[-1]))


def edges_of(graph: GraphReport, kernels: Sequence[Kernel]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of kernels of which the second reads the first, through views."""
    kernel_of = {index: kernel.index for kernel in kernels for index in kernel.members}
    places = {one.facts.node: index for index, one in enumerate(graph.operators)}
    found: dict[tuple[int, int], None] = {}
    for index, one in enumerate(graph.operators):
        if index not in kernel_of:
            continue
        for node in one.facts.reads:
            source: int | None = places[node]
            while source is not None and source not in kernel_of:
                earlier = graph.operators[source].facts.reads
                source = places[earlier[0]] if earlier else None
            if source is not None and kernel_of[source] != kernel_of[index]:
                found[kernel_of[source], kernel_of[index]] = None
    return tuple(found)


def picture_of(graph: GraphReport, name: str) -> NetworkPicture:
    """Return the picture of a graph.

    Args:
        graph: the graph.
        name: title of operators outside of any module.
    """
    kernels = kernels_of(graph)
    edges = edges_of(graph, kernels)
    boxes = [_box(title, own, edges) for title, own in _modules(kernels, name)]
    shelves = _shelves(boxes)
    width = max((box.x + box.width for box in boxes), default=0) + MARGIN
    height = max((box.y + box.height for box in boxes), default=0) + MARGIN
    return NetworkPicture(tuple(boxes), tuple(_routes(boxes, shelves, edges)), edges, max(width, 320), height)


# ---- modules --------------------------------------------------------------------------------------------------------


def _modules(kernels: Sequence[Kernel], name: str) -> Iterator[tuple[str, list[Kernel]]]:
    """Yield title and kernels of every box: modules of one depth, and what runs between them."""
    depth = next((d for d in range(1, DEEPEST) if _largest(kernels, d) <= MOST_IN_A_BOX), DEEPEST)
    runs = [(path, list(own)) for path, own in groupby(kernels, key=lambda kernel: _prefix(kernel, depth))]
    for is_small, group in groupby(runs, key=lambda run: len(run[1]) == 1 and run[0] != ""):
        found = list(group)
        if not is_small:
            yield from ((path or name, own) for path, own in found)
            continue
        for start in range(0, len(found), MOST_IN_A_BOX):
            part = found[start : start + MOST_IN_A_BOX]
            yield _joined([path for path, _ in part]), [kernel for _, own in part for kernel in own]


def _largest(kernels: Sequence[Kernel], depth: int) -> int:
    return max((len(list(own)) for _, own in groupby(kernels, key=lambda one: _prefix(one, depth))), default=0)


def _prefix(kernel: Kernel, depth: int) -> str:
    return ".".join(kernel.owner.facts.path.split(".")[:depth])


def _joined(paths: Sequence[str]) -> str:
    """Return the paths of several modules as one title."""
    text = ", ".join(paths)
    return text if len(text) <= LONGEST_TITLE else f"{paths[0]} … {paths[-1]}"


# ---- boxes ----------------------------------------------------------------------------------------------------------


def _box(title: str, kernels: Sequence[Kernel], edges: Sequence[tuple[int, int]]) -> ModuleBox:
    """Return a box whose kernels are placed relative to its corner: each below those that it reads."""
    own = {kernel.index for kernel in kernels}
    inner = [(source, target) for source, target in edges if source in own and target in own]
    sources: dict[int, list[int]] = {}
    for source, target in inner:
        sources.setdefault(target, []).append(source)
    rank, lane = dict[int, int](), dict[int, int]()
    taken: dict[int, set[int]] = {}
    for kernel in kernels:
        before = sources.get(kernel.index, [])
        rank[kernel.index] = max((rank[one] + 1 for one in before if one in rank), default=0)
        used = taken.setdefault(rank[kernel.index], set())
        wished = [lane[one] for one in before if one in lane]
        lane[kernel.index] = next(one for one in (*wished, *range(len(kernels) + 1)) if one not in used)
        used.add(lane[kernel.index])
    labels = _labels(kernels, title)
    nodes = [PlacedKernel(kernel, label) for kernel, label in zip(kernels, labels, strict=True)]
    for node in nodes:
        node.x = PADDING + lane[node.kernel.index] * (NODE_WIDTH + COLUMN_GAP)
        node.y = TITLE + PADDING + rank[node.kernel.index] * (NODE_HEIGHT + ROW_GAP)
    columns, rows = max(lane.values()) + 1, max(rank.values()) + 1
    box = ModuleBox(title, nodes)
    box.width = 2 * PADDING + columns * NODE_WIDTH + (columns - 1) * COLUMN_GAP
    box.height = TITLE + 2 * PADDING + rows * NODE_HEIGHT + (rows - 1) * ROW_GAP
    at = {node.kernel.index: node for node in nodes}
    box.links = [_link(at[source], at[target]) for source, target in inner]
    return box


def _labels(kernels: Sequence[Kernel], title: str) -> list[str]:
    """Return a short name of each kernel of a box: the last parts of its path that no other one has, or its
    operator."""
    paths = [_inside(kernel, title) for kernel in kernels]
    found = []
    for kernel, path in zip(kernels, paths, strict=True):
        parts = path.split(".")
        ends = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        alone = [end for end in ends if sum(f".{other}".endswith(f".{end}") for other in paths) == 1]
        name = next((end for end in alone if not end.isdigit()), path)
        found.append(_shortened(f"{name} {_operator(kernel)}" if name.isdigit() else name))
    return found


def _shortened(label: str) -> str:
    """Return a label that fits its box: a short first part and the end of a path, or the beginning of a name."""
    if len(label) <= LONGEST_LABEL:
        return label
    first, dot, _ = label.partition(".")
    kept = f"{first}." if dot and len(first) < LONGEST_LABEL // 2 else ""
    end = label[len(kept) + 1 - LONGEST_LABEL :].lstrip(".")
    return f"{kept}…{end}" if dot else f"{label[: LONGEST_LABEL - 1]}…"


def _operator(kernel: Kernel) -> str:
    return kernel.owner.facts.operator.removeprefix("aten.").partition(".")[0]


def _inside(kernel: Kernel, title: str) -> str:
    """Return the path of a kernel inside of its box, or its operator."""
    facts = kernel.owner.facts
    inside = facts.path.removeprefix(f"{title}.") if facts.path.startswith(f"{title}.") else facts.path
    return _operator(kernel) if not inside or (inside == title and "." in inside) else inside


def _link(source: PlacedKernel, target: PlacedKernel) -> str:
    """Return the line from the lower end of a kernel to the upper end of another one."""
    x, y = source.x + NODE_WIDTH / 2, source.y + NODE_HEIGHT
    to_x, to_y = target.x + NODE_WIDTH / 2, target.y
    if source.x == target.x and to_y - y > ROW_GAP:  # around the kernels between them
        side = source.x + NODE_WIDTH + COLUMN_GAP / 2
        return f"M{x:g} {y:g}C{x:g} {y + ROW_GAP:g} {side:g} {y:g} {side:g} {y + ROW_GAP:g}V{to_y - ROW_GAP:g}" + (
            f"C{side:g} {to_y:g} {to_x:g} {to_y - ROW_GAP:g} {to_x:g} {to_y:g}"
        )
    middle = (y + to_y) / 2
    return f"M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"


# ---- rows of boxes --------------------------------------------------------------------------------------------------


def _shelves(boxes: Sequence[ModuleBox]) -> list[float]:
    """Place boxes in rows, and return the number of the row of each box."""
    shelf_of, x, y, tallest, shelf = list[float](), float(MARGIN), float(SHELF_GAP), 0.0, 0
    for box in boxes:
        if x > MARGIN and x + box.width > WIDTH - MARGIN:
            x, y, tallest, shelf = float(MARGIN), y + tallest + SHELF_GAP, 0.0, shelf + 1
        box.x, box.y = x, y
        x, tallest = x + box.width + BOX_GAP, max(tallest, box.height)
        shelf_of.append(shelf)
    return shelf_of


def _routes(boxes: Sequence[ModuleBox], shelves: Sequence[float], edges: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield the lines between boxes: straight to the next one, else through the gaps between rows."""
    box_of = {node.kernel.index: number for number, box in enumerate(boxes) for node in box.nodes}
    pairs = dict.fromkeys((box_of[a], box_of[b]) for a, b in edges if box_of[a] != box_of[b])
    ends: Mapping[float, float] = {
        shelf: max(box.y + box.height for box, own in zip(boxes, shelves, strict=True) if own == shelf)
        for shelf in shelves
    }
    tracks = Counter[float]()
    neighbours = {(a, b) for a, b in pairwise(range(len(boxes))) if shelves[a] == shelves[b]}
    for first, second in pairs:
        source, target = boxes[first], boxes[second]
        x, y, to_x, to_y = source.x + source.width, source.y + TITLE / 2, target.x, target.y + TITLE / 2
        if (first, second) in neighbours:
            yield f"M{x:g} {y:g}H{to_x:g}"
            continue
        track = tracks[shelves[first]] % TRACKS * 4
        tracks[shelves[first]] += 1
        out, into = x + 5 + track, to_x - 5 - track
        if shelves[first] == shelves[second]:
            yield f"M{x:g} {y:g}H{out:g}V{source.y - 8 - track:g}H{into:g}V{to_y:g}H{to_x:g}"
            continue
        below = ends[shelves[first]] + 8 + track
        if shelves[second] == shelves[first] + 1:
            yield f"M{x:g} {y:g}H{out:g}V{below:g}H{into:g}V{to_y:g}H{to_x:g}"
        else:
            above = target.y - 8 - track
            yield f"M{x:g} {y:g}H{out:g}V{below:g}H{4 + track:g}V{above:g}H{into:g}V{to_y:g}H{to_x:g}"
