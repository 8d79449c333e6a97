"""How a large batch takes the first steps: some images after the others.

What early steps leave for each other is larger than the second-level cache for a whole batch, hardly for an image or
two, and their weights are few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from intaglio.codegen.context import Context
from intaglio.codegen.schedule import CacheSizes
from intaglio.codegen.writer import Code
from intaglio.ir import (
    Dim,
    Graph,
    Partition,
    Placement,
    Plan,
    Shape,
    Step,
    evaluate,
    numel,
    symbol,
    symbols_of,
)
from intaglio.ir.verify import PRODUCTS

KEEPS_IMAGES_APART = frozenset(
    {
        *PRODUCTS,
        *(f"{kind}{axes}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool") for axes in (1, 2, 3)),
        "requantize",
        "activate",
        "add",
        "mul",
        "affine",
        "clamp",
        "prelu",
        "table",
        "quantize",
        "pixels",
        "reshape",
        "permute",
        "shuffle",
        "pixel_shuffle",
        "pixel_unshuffle",
        "slice",
        "pad",
        "cat",
    }
)
"""Operators that make each image of the result of that image alone if the free batch is the first axis of both: no
move along that axis leaves as many."""
MOST_AXES = 5
"""Of a tensor of the caller that lies anyhow: strides of the last five are known."""


@dataclass(frozen=True)
class Turns:
    """Steps of the first ``phases`` phases run for ``images`` images a thread, then for as many others, along the free
    dimension ``batch``. Bits never depend on it."""

    batch: str
    phases: int
    images: int


def analytic_turns(plan: Plan, caches: CacheSizes) -> Turns | None:
    """As many images as fit the second level with the activations of the largest step, at least one.

    Turns keep activations in cache and read weights again: they end where the activations of one image exceed all
    weights by most, behind a step whose activations are much of the second level. Free sizes besides the batch count
    as 1.
    """
    batch = batch_symbol(plan.graph)
    kept = best = phases = most = largest = 0
    for steps in separable(plan):
        activations = [_activation_bytes(step.partition, plan.graph) for step in steps]
        kept += sum(activations) - sum(_weight_bytes(step.partition, plan.graph) for step in steps)
        most = max(most, *activations)
        if kept > best and max(activations) > caches.l2 // 8:
            best, phases, largest = kept, steps[0].phase + 1, most
    return Turns(batch, phases, max(1, caches.l2 // largest)) if batch and phases else None


def separable(plan: Plan) -> Iterator[list[Step]]:
    """First phases whose steps all keep images apart, and end before the program's tensors for the caller."""
    batch = batch_symbol(plan.graph)
    for _, steps in groupby(plan.steps, key=lambda step: step.phase):
        found = list(steps)
        if batch is None or not all(_is_separable(step.partition, plan, batch) for step in found):
            return
        yield found


def batch_symbol(graph: Graph) -> str | None:
    """The free dimension that is the first input's first axis."""
    shape = graph.types[graph.inputs[0]].shape if graph.inputs else ()
    return next((name for name in symbols_of(shape[0]) if shape[0] == symbol(name)), None) if shape else None


def _is_separable(partition: Partition, plan: Plan, batch: str) -> bool:
    """Constants have no images; what is written must be a buffer, there and where it really lies."""
    graph, buffers = plan.graph, plan.buffers
    if not all(op.kind in KEEPS_IMAGES_APART for op in partition.ops):
        return False
    values = [name for op in partition.ops for name in (*op.inputs, *op.outputs) if name not in graph.constants]
    roots = [buffers[buffers[name].alias or name] for name in values if name in buffers]
    shapes = [graph.types[name].shape for name in values] + [root.shape for root in roots]
    return partition.output in buffers and all(_has_images(shape, batch) for shape in shapes)


def _has_images(shape: Shape, batch: str) -> bool:
    if not 1 < len(shape) <= MOST_AXES or shape[0] != symbol(batch):
        return False
    return not any(batch in symbols_of(dim) for dim in shape[1:])


def _weight_bytes(partition: Partition, graph: Graph) -> int:
    return sum(graph.constants[name].nbytes for name in partition.reads() if name in graph.constants)


def _activation_bytes(partition: Partition, graph: Graph) -> int:
    """Of one image, read and written."""
    values = (*partition.reads(), *partition.ops[-1].outputs)
    kinds = [graph.types[name] for name in values if name not in graph.constants]
    return sum(_at_one(numel(kind.shape)) * kind.dtype.bytes for kind in kinds)


def _at_one(dim: Dim) -> int:
    return evaluate(dim, dict.fromkeys(symbols_of(dim), 1))


def positions(plan: Plan, turns: Turns | None) -> dict[str, int]:
    """Where in the table of offsets each buffer is.

    With turns: their memory, buffers that outlive them, the bytes of one turn, and the buffers of a turn, which have
    their place in it.
    """
    outside, inside = _sorted(plan, turns)
    found = {placement.value: index for index, placement in enumerate(outside, start=int(turns is not None))}
    return found | {placement.value: index for index, placement in enumerate(inside, start=len(outside) + 2)}


def _sorted(plan: Plan, turns: Turns | None) -> tuple[list[Placement], list[Placement]]:
    """Buffers that are read behind all turns or made there, and those of a turn."""
    end = turns.phases if turns else 0
    return [p for p in plan.placements if p.last >= end], [p for p in plan.placements if p.last < end]


def emit_places(code: Code, context: Context, turns: Turns | None) -> None:
    """Sizes as expressions over the free dimensions, in placement order."""
    outside, inside = _sorted(context.plan, turns)
    sizes = [context.dim(context.plan.buffers[placement.value].size()) for placement in outside]
    lives = [(placement.first, placement.last) for placement in outside]
    if turns is not None:
        one, bytes_at = f"some_{turns.batch}", f"offsets[{len(outside) + 1}]"
        code(f"const int64_t {one} = {turns.batch} < {turns.images} ? {turns.batch} : {turns.images};")
        own = [_bytes_of(placement, one, context, turns) for placement in inside]
        _emit_tables(code, own, [(placement.first, placement.last) for placement in inside], "turn_")
        code(f"{bytes_at} = place(turn_lives, turn_sizes, {len(own)}, offsets + {len(outside) + 2});")
        sizes = [f"{bytes_at} * turns_at_once({turns.batch}, {turns.images})", *sizes]
        lives = [(0, turns.phases - 1), *[(0 if first < turns.phases else first, last) for first, last in lives]]
    _emit_tables(code, sizes, lives, "")
    code(f"return place(lives, sizes, {len(sizes)}, offsets);")


def _emit_tables(code: Code, sizes: Sequence[str], lives: Sequence[tuple[int, int]], prefix: str) -> None:
    code(f"const int64_t {prefix}sizes[] = {{{', '.join(sizes) or 0}}};")
    spans = ", ".join(f"{{{first}, {last}}}" for first, last in lives)
    code(f"static const struct Life {prefix}lives[] = {{{spans or '{0, 0}'}}};")


def _bytes_of(placement: Placement, images: str, context: Context, turns: Turns) -> str:
    """C expression for some images of a buffer; where threads leave their sums of one image there is no batch."""
    buffer = context.plan.buffers[placement.value]
    if buffer.shape[0] != symbol(turns.batch):
        return context.dim(buffer.size())
    return f"{images} * {context.dim(replace(buffer, shape=(1, *buffer.shape[1:])).size())}"


def emit_turn(code: Code, calls: Sequence[str], turns: Turns, context: Context) -> None:
    """One function: ``calls`` of steps on some images of the batch."""
    plan, (outside, inside) = context.plan, _sorted(context.plan, turns)
    batch, last = context.symbols.index(turns.batch), len(plan.placements) + 2
    body = Code()
    for name, kind, count in (
        ("dims", "int64_t", len(context.symbols)),
        ("offsets", "int64_t", last),
        ("external", "uint8_t*", len(plan.external)),
    ):
        body(f"{kind} {name}[{count}];")
        body(f"memcpy({name}, whole->{name}, sizeof {name});")
    body(f"dims[{batch}] = part->count;")
    for line in _externals_at(plan, turns):
        body(line)
    for placement in (p for p in outside if p.first < turns.phases):
        size = _bytes_of(placement, "part->first", context, turns)
        body(f"offsets[{context.index[placement.value]}] += {size};")
    body(f"const int64_t begin = offsets[0] + part->slot * offsets[{len(outside) + 1}];")
    body(f"for (int i = {last - len(inside)}; i < {last}; ++i) offsets[i] = begin + part->spread * offsets[i];")
    body("struct Run some = *whole;")
    body("some.dims = dims, some.offsets = offsets, some.external = external;")
    body("if (part->slot) some.times = 0;  // one clock is enough")
    body("const struct Run* r = &some;")
    for call in calls:
        body(call)
    images = f"{turns.images} images" if turns.images > 1 else "one image"
    code(f"// Steps of the first {turns.phases} phases, which a larger batch takes in turns of {images} a thread.")
    with code.block("static void turn(const struct Run* whole, const struct Part* part, int thread, int threads)"):
        for line in context.dims_used(body.text()):
            code(line.replace("r->dims", "whole->dims"))
        code(body.text())


def turns_call(turns: Turns, context: Context) -> str:
    """Runs that function for all images."""
    batch = f"r->dims[{context.symbols.index(turns.batch)}]"
    return f"take_turns(r, turn, {batch}, {turns.images}, thread, threads);"


def _externals_at(plan: Plan, turns: Turns) -> list[str]:
    """Of the caller's tensors those that are read, from the first image on; pixels may come as the bytes they are."""
    found = {}
    for op in (step.partition.anchor for step in plan.steps if step.phase < turns.phases):
        for name in op.inputs:
            if name in plan.external:
                index, size = plan.external.index(name), str(plan.graph.types[name].dtype.bytes)
                size = f"(whole->bytes[{index}] ? 1 : {size})" if op.kind == "pixels" else size
                found[index] = f"external[{index}] += part->first * whole->strides[{5 * index}] * {size};"
    return [found[index] for index in sorted(found)]
