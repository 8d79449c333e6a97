"""Print batch tiling: buffer offsets, and the function that runs the leading steps on a sub-batch."""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code
from intaglio.ops import op_def
from intaglio.ops.pointwise import PIXELS
from intaglio.plan.arena import bytes_per_image, conflicts_of
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import BatchTiling, BufferLifetime


def emit_places(code: Code, context: Context) -> None:
    """Print the computation of buffer offsets from sizes, which depend on dynamic dimensions, and lifetimes."""
    arena = context.plan.arena()
    tiling, outside, inside = arena.tiling, arena.outside, arena.tile
    sizes = [context.dim(context.plan.buffers[placement.value].size()) for placement in outside]
    lifetimes = [(placement.first, placement.last) for placement in outside]
    if tiling is not None:
        one, bytes_at = f"some_{tiling.batch}", f"offsets[{len(outside) + 1}]"
        code(f"const int64_t {one} = {tiling.batch} < {tiling.images} ? {tiling.batch} : {tiling.images};")
        own = [_bytes_of(placement, one, context, tiling) for placement in inside]
        _emit_tables(code, own, [(placement.first, placement.last) for placement in inside], "tile_")
        places = f"offsets + {len(outside) + 2}"
        code(f"{bytes_at} = place_buffers(tile_conflicts, tile_ends, tile_sizes, {len(own)}, {places});")
        sizes = [f"{bytes_at} * concurrent_batch_tiles({tiling.batch}, {tiling.images})", *sizes]
        lifetimes = [(0, tiling.groups - 1), *lifetimes]
    _emit_tables(code, sizes, lifetimes, "")
    code(f"return place_buffers(conflicts, ends, sizes, {len(sizes)}, offsets);")


def _emit_tables(code: Code, sizes: Sequence[str], lifetimes: Sequence[tuple[int, int]], prefix: str) -> None:
    code(f"const int64_t {prefix}sizes[] = {{{', '.join(sizes) or 0}}};")
    for name, numbers in zip(("conflicts", "ends"), conflicts_of(lifetimes), strict=True):
        code(f"static const int32_t {prefix}{name}[] = {{{', '.join(map(str, numbers)) or 0}}};")


def _bytes_of(placement: BufferLifetime, images: str, context: Context, tiling: BatchTiling) -> str:
    """Return a C expression for the bytes of some images of a buffer.

    The partial sums that threads leave for a single image have no batch axis; their entire size is returned.
    """
    buffer = context.plan.buffers[placement.value]
    one = bytes_per_image(buffer, tiling)
    return context.dim(buffer.size()) if one is None else f"{images} * {context.dim(one)}"


def emit_batch_tile(code: Code, calls: Sequence[str], tiling: BatchTiling, context: Context) -> None:
    """Print the function that runs the steps in `calls` on some images of the batch."""
    plan, arena = context.plan, context.plan.arena()
    outside, inside = arena.outside, arena.tile
    batch, last = context.symbols.index(tiling.batch), len(plan.lifetimes) + 2
    body = Code()
    for name, kind, count in (
        ("dims", "int64_t", len(context.symbols)),
        ("offsets", "int64_t", last),
        ("external", "uint8_t*", len(plan.external)),
    ):
        body(f"{kind} {name}[{count}];")
        body(f"memcpy({name}, batch_run->{name}, sizeof {name});")
    body(f"dims[{batch}] = sub_batch->count;")
    for line in _externals_at(plan, tiling):
        body(line)
    for placement in (p for p in outside if p.first < tiling.groups):
        size = _bytes_of(placement, "sub_batch->first", context, tiling)
        body(f"offsets[{context.index[placement.value]}] += {size};")
    body(f"const int64_t begin = offsets[0] + sub_batch->slot * offsets[{len(outside) + 1}];")
    body(f"for (int i = {last - len(inside)}; i < {last}; ++i) offsets[i] = begin + sub_batch->spread * offsets[i];")
    body("struct Run sub_run = *batch_run;")
    body("sub_run.dims = dims, sub_run.offsets = offsets, sub_run.external = external;")
    body("if (sub_batch->slot) sub_run.times = 0;  // one clock is enough")
    body("const struct Run* r = &sub_run;")
    for call in calls:
        body(call)
    images = f"{tiling.images} images" if tiling.images > 1 else "one image"
    code(f"// Steps of the first {tiling.groups} barrier groups, which run on sub-batches of {images} a thread.")
    arguments = "const struct Run* batch_run, const struct SubBatch* sub_batch, int thread, int threads"
    with code.block(f"static void run_batch_tile({arguments})"):
        for line in context.dims_used(body.text()):
            code(line.replace("r->dims", "batch_run->dims"))
        code(body.text())


def batch_tiles_call(tiling: BatchTiling, context: Context) -> str:
    """Return the C statement that calls this function for all sub-batches."""
    batch = f"r->dims[{context.symbols.index(tiling.batch)}]"
    return f"run_batch_tiles(r, run_batch_tile, {batch}, {tiling.images}, thread, threads);"


def _externals_at(plan: Plan, tiling: BatchTiling) -> list[str]:
    """Return statements that advance the pointers of input tensors, also of those read through views, to the first
    image of the sub-batch.

    Elements of an input image have one byte if the caller passes uint8 pixels.
    """
    found = {}
    tiled = (step.partition for step in plan.steps if step.barrier_group < tiling.groups)
    for op in (op for partition in tiled for op in partition.ops):
        for name in map(plan.root, op.inputs):
            if name in plan.external:
                index, size = plan.external.index(name), str(plan.graph.types[name].dtype.bytes)
                size = f"(batch_run->bytes[{index}] ? 1 : {size})" if op_def(op) is PIXELS else size
                found[index] = f"external[{index}] += sub_batch->first * batch_run->strides[{5 * index}] * {size};"
    return [found[index] for index in sorted(found)]
