"""The text of batch tiling: places of buffers, and the function that runs the leading steps on some images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code
from intaglio.ir import symbol
from intaglio.plan.batch_tiling import Turns
from intaglio.plan.plan_records import Placement, Plan


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
