"""Print loops: one pass over memory per stage between reductions, and an exact remainder after whole vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from intaglio import numerics
from intaglio.codegen.context import Context, fill_result_halo
from intaglio.codegen.emitters.loop_variables import Loop, number, operand_of, value_of, zero_point
from intaglio.codegen.writer import Code
from intaglio.ir import DType, Op, numel
from intaglio.ops.loop_ops.primitives import Lanes, primitive
from intaglio.ops.products.scratch_memory import CACHE_LINE
from intaglio.plan.loops.loop_records import LoopOperand, LoopVariant
from intaglio.plan.loops.loop_stages import LoopStage
from intaglio.plan.plan_records import Partition

LOOP_ELEMENT = {
    DType.F32: "float",
    DType.BF16: "uint16_t",
    DType.U8: "uint8_t",
    DType.BOOL: "uint8_t",
    DType.I64: "int64_t",
}
VECTOR = {DType.F32: "Reals", DType.BF16: "Reals", DType.U8: "RealBits", DType.BOOL: "RealBits", DType.I64: "Longs"}


def emit_loop(code: Code, partition: Partition, context: Context) -> None:
    """Print a loop step. Threads divide the rows, and each row is processed in one or more passes."""
    context.include("elementwise/loops.h")
    schedule = context.plan.loops[partition.anchor.outputs[0]]
    loop = Loop(schedule, context)
    rows = schedule.rows
    code(f"const int64_t size = {context.dim(rows.size)}, rows = {context.dim(numel(rows.outer))};")
    _declare_operands(code, loop)
    _declare_clip_counts(code, loop)
    variant, *others = schedule.variants
    if not others:
        _rows(code, loop, variant)
    for longer in others:
        with code.block(f"if (size <= {variant.longest})"):
            _rows(code, loop, variant)
        with code.block("else"):
            _rows(code, loop, longer)
    for name, index in loop.clip_counts.items():
        code(f"add_clipped(r->clipped, {index}, sum_of({loop.names[name]}_clipped));")
    fill_frames(code, partition.anchor, context)


def _declare_clip_counts(code: Code, loop: Loop) -> None:
    """Declare the counts of clipped elements, one per lane, and the bounds that they are compared with."""
    loop.count_clipped()
    for name in loop.clip_counts:
        q = loop.body.types[name].qparams
        bounds = ", ".join(map(number, numerics.clip_bounds(q.step, q.zero, q.qmin, q.qmax)))
        code(f"const struct ClipBounds {loop.names[name]}_bounds = {{{bounds}}};")
        code(f"RealBits {loop.names[name]}_clipped = {{}};")


def _count_clipped(name: str, loop: Loop, count: str) -> str:
    """Return a statement that counts the clipped elements among the first `count` lanes of a result."""
    op, variable = loop.quantize_of(name), loop.names[name]
    assert op is not None, f"{name} is not quantized"
    inverse = number(numerics.reciprocal(loop.body.types[name].qparams.step))
    return f"count_lanes(&{variable}_clipped, {operand_of(op.inputs[0], loop)}, {inverse}, {variable}_bounds, {count});"


def _declare_operands(code: Code, loop: Loop) -> None:
    """Declare a pointer to the first element of every operand and result."""
    for operand in loop.schedule.operands.values():
        const = "" if loop.is_result(operand) else "const "
        if not loop.is_tile(operand):
            code(
                f"{const}{LOOP_ELEMENT[operand.dtype]}* const {loop.names[operand.name]}_at = "
                f"({const}{LOOP_ELEMENT[operand.dtype]}*){loop.pointers[operand.value]};"
            )


def fill_frames(code: Code, op: Op, context: Context) -> None:
    """Print code that fills the halos of a loop's results."""
    for name in op.outputs:
        if context.halo(name):
            with code.block(""):
                fill_result_halo(code, context, name, context.limits(Op("loop", (), (name,))))


def epilogue(partition: Partition, context: Context, width: int) -> str:
    """Print the function of a partition's epilogue ahead of the step, and return its `struct Epilogue`.

    The function has a second version for `width` channels, the size of a full panel.
    """
    context.include("elementwise/loops.h", "products/epilogue.h")
    op, made = partition.ops[-1], partition.ops[-2].output
    loop = Loop(context.plan.loops[op.outputs[0]], context)
    body = Code()
    _declare_operands(body, loop)
    with body.block("for (int64_t p = 0; p < pixels; ++p, tile += stride)"):
        body("const int64_t row = pixel + p, first = 0, last = channels;")
        _pointers(body, loop)
        if context.isa.has_setup:
            _prefetch_next_pixels(body, loop)
        for stage in loop.schedule.variants[0].stages:
            _stage(body, loop, stage, {})
    name, code = f"behind_{made}", Code()
    head = (
        "const struct Run* r, const uint8_t* tile, int64_t stride, int64_t pixel, int64_t pixels, int64_t channel, "
        "int64_t channels"
    )
    with code.block(f"static inline __attribute__((always_inline)) void some_{name}({head})"):
        for line in context.dims_used(body.text()):
            code(line)
        code(body.text())
    with code.block(f"static void {name}({head})"):
        code(f"if (channels == {width}) some_{name}(r, tile, stride, pixel, pixels, channel, {width});")
        code(f"else some_{name}(r, tile, stride, pixel, pixels, channel, channels);")
    context.functions.append(code.text())
    return f"(struct Epilogue){{{name}, r, {context.graph.types[made].dtype.bytes}}}"


def _prefetch_next_pixels(code: Code, loop: Loop) -> None:
    """Print prefetches of the operands from memory for the next call of an epilogue.

    Products with tile registers take so little time that these loads would wait: a layer of 3,072 channels whose
    result is multiplied by SiLU of another takes 0.87 to 0.94 of its time (512 tokens, one thread of a Xeon). With
    AVX512-VNNI it takes the same time.
    """
    for operand in loop.schedule.operands.values():
        *steps, inner = loop.schedule.rows.strides[operand.name]
        if len(steps) != 1 or steps[0] == 0 or inner != 1 or loop.is_tile(operand) or loop.is_result(operand):
            continue
        next_row = f"{loop.names[operand.name]}_row + pixels * {loop.context.dim(steps[0])}"
        elements = CACHE_LINE // operand.dtype.bytes
        with code.block(f"for (int64_t c = 0; c < channels; c += {elements})"):
            code(f"__builtin_prefetch({next_row} + c);")


def _rows(code: Code, loop: Loop, variant: LoopVariant) -> None:
    """Print the loop over rows. Without a reduction, long rows are divided into pieces."""
    if loop.across is not None:
        _rows_across(code, loop, variant, loop.across)
        return
    axis, kept = loop.schedule.axis, {name: place for place, name in enumerate(variant.kept)}
    if kept:
        code(f"float kept[{len(kept)}][{-(-variant.longest // 16) * 16}] __attribute__((aligned(64)));")
    if axis is None:
        code("const int64_t pieces = (size + PIECE - 1) / PIECE;")
        units = "rows * pieces"
    else:
        units = "rows"
    with shared_units(code, units):
        if axis is None:
            code("const int64_t row = u / pieces, first = u % pieces * PIECE;")
            code("const int64_t last = size - first < PIECE ? size : first + PIECE;")
        else:
            code("const int64_t row = u, first = 0, last = size;")
        _pointers(code, loop)
        for stage in variant.stages:
            _stage(code, loop, stage, kept)
        _store_rows(code, loop)
    if loop.schedule.streamed:
        code("end_streams();")


@contextmanager
def shared_units(code: Code, units: str) -> Iterator[None]:
    """Print the loop over the units of a step of ``rows`` of ``size`` elements, which threads share."""
    code("struct Sharing sharing = enter_step(r->shares, rows * size / ELEMENTS_PER_NS, thread, threads);")
    with code.block("while (next_piece(&sharing))"):
        code(f"const int64_t end = first_item(&sharing, {units}, 1);")
        with code.block(f"for (int64_t u = first_item(&sharing, {units}, 0); u < end; ++u)"):
            yield


def _rows_across(code: Code, loop: Loop, variant: LoopVariant, axis: int) -> None:
    """Print the loop over rows of a reduction, whose vectors hold the elements of neighbouring rows.

    Each lane adds up the partial results of its row in the order of `for_each_block`, so results have the same bits.
    """
    outer, (stage,) = loop.schedule.rows.outer, (one for one in variant.stages if not one.empty)
    width, others = outer[axis], [place for place in range(len(outer)) if place != axis]
    code(f"const int64_t blocks = ({width} + FLOATS - 1) / FLOATS, units = rows / {width} * blocks;")
    with shared_units(code, "units"):
        code(f"int64_t rest = u / blocks;\nconst int64_t i{axis} = u % blocks * FLOATS;")
        for place in reversed(others):
            code(f"const int64_t i{place} = rest % ({loop.context.dim(outer[place])});")
            code(f"rest /= {loop.context.dim(outer[place])};")
        with code.block("const auto pass = [&](const int64_t count) __attribute__((always_inline))", end="};"):
            _row_pointers(code, loop, [f"i{place}" for place in range(len(outer))])
            for one in variant.stages:
                if one is stage:
                    _stage_across(code, loop, one)
                else:
                    _stage(code, loop, one, {})
            _store_rows(code, loop)
        code(f"if ({width} - i{axis} >= FLOATS) pass(FLOATS);\nelse pass({width} - i{axis});")


def _stage_across(code: Code, loop: Loop, stage: LoopStage) -> None:
    """Print the pass along a row of which vectors hold one element each."""
    for op in stage.row:
        code(f"const {VECTOR[loop.body.types[op.output].dtype]} {loop.names[op.output]} = {value_of(op, loop)};")
    for op in stage.reductions:
        code(f"Reals {loop.names[op.output]}_lanes[LANES];")
        code(f"for (int l = 0; l < LANES; ++l) {loop.names[op.output]}_lanes[l] = all_lanes({_lanes(op).start});")
    with code.block("for (int64_t e = 0; e < size; ++e)"):
        code("enum { COUNT = 1 };")
        _pass(code, loop, stage, {})
    for op in stage.reductions:
        reduced = _lanes(op).final.format(f"{loop.names[op.output]}_lanes", "vectors")
        code(f"const Reals {loop.names[op.output]} = {reduced};")


def _pointers(code: Code, loop: Loop) -> None:
    """Declare pointers to the current row of every operand, and the values that are constant along a row."""
    context, indices = loop.context, ["row"]
    outer = loop.schedule.rows.outer
    if len(outer) > 1:
        indices = [f"i{axis}" for axis in range(len(outer))]
        code("int64_t rest = row;")
        for axis in reversed(range(1, len(outer))):
            code(f"const int64_t i{axis} = rest % ({context.dim(outer[axis])});")
            code(f"rest /= {context.dim(outer[axis])};")
        code("const int64_t i0 = rest;")
    _row_pointers(code, loop, indices)


def _row_pointers(code: Code, loop: Loop, indices: list[str]) -> None:
    """Declare pointers to the row with these indices, and the values that are constant along it."""
    schedule, context = loop.schedule, loop.context
    for operand in schedule.operands.values():
        *steps, inner = schedule.rows.strides[operand.name]
        name, element = loop.names[operand.name], LOOP_ELEMENT[operand.dtype]
        terms = [f"{index} * {context.dim(step)}" for index, step in zip(indices, steps, strict=False) if step != 0]
        const = "" if loop.is_result(operand) else "const "
        if loop.is_tile(operand):
            code(f"const {element}* const {name}_row = (const {element}*)tile;")
            continue
        if schedule.tile is not None and inner != 0:
            terms.append(f"channel * {context.dim(inner)}")
        code(f"{const}{element}* const {name}_row = {' + '.join([f'{name}_at', *terms])};")
        if operand.name in schedule.row_values and not loop.is_result(operand):
            code(f"const {VECTOR[operand.dtype]} {name} = {_load_row_value(operand, loop)};")
        if operand.name in schedule.streamed:
            code(f"const int {name}_streamed = is_streamed({name}_row, 4 * rows * size);")
    for name, step in schedule.tables.items():
        _table(code, loop, name, step)


def _load_row_value(operand: LoopOperand, loop: Loop) -> str:
    """Return the value of a row in every lane, or those of neighbouring rows."""
    row = f"{loop.names[operand.name]}_row"
    step = 0 if loop.across is None else loop.schedule.rows.strides[operand.name][loop.across]
    if step == 0:
        return f"all_{operand.dtype}({row})"
    return f"read_{operand.dtype}({row}, {loop.context.dim(step)}, count)"


def _table(code: Code, loop: Loop, name: str, step: Op) -> None:
    """Declare a pointer to the embedding row of an id. An id out of range sets `outside` and selects row 0."""
    table, rows = step.inputs[0], loop.names[name]
    pointer, count = loop.pointers[loop.graph_value(table)], loop.context.dim(loop.body.types[table].shape[0])
    code(f"int64_t {rows}_id = *{loop.names[step.inputs[1]]}_row;")
    code(f"if ({rows}_id < 0 || {rows}_id >= {count}) *r->outside = 1, {rows}_id = 0;")
    element = LOOP_ELEMENT[loop.body.types[table].dtype]
    code(f"const {element}* const {rows}_found = (const {element}*){pointer} + {rows}_id * {loop.row_stride(table)};")
    for label, parameters in zip(("scale", "zero"), step.inputs[2:], strict=False):
        values = loop.pointers[loop.graph_value(parameters)]
        code(f"const float {rows}_{label} = ((const float*){values})[{rows}_id];")


def _stage(code: Code, loop: Loop, stage: LoopStage, kept: Mapping[str, int]) -> None:
    names, types = loop.names, loop.body.types
    for op in stage.row:
        code(f"const {VECTOR[types[op.output].dtype]} {names[op.output]} = {value_of(op, loop)};")
    if stage.empty:
        return
    for op in stage.reductions:
        code(f"Reals {names[op.output]}_lanes[GROUPS];")
        code(f"for (int g = 0; g < GROUPS; ++g) {names[op.output]}_lanes[g] = all_lanes({_lanes(op).start});")
    group = "int g" if stage.reductions else "int"
    arguments = f"int64_t e, int64_t count, {group}, auto vectors"
    head = f"for_each_block(first, last, [&]({arguments}) __attribute__((always_inline))"
    with code.block(head, end="});"):
        code("enum { COUNT = decltype(vectors)::COUNT };")
        _pass(code, loop, stage, kept)
    for op in stage.reductions:
        code(f"const Reals {names[op.output]} = {_lanes(op).final.format(f'{names[op.output]}_lanes', 'lanes')};")


def _pass(code: Code, loop: Loop, stage: LoopStage, kept: Mapping[str, int]) -> None:
    """Print the operators of a stage, each for all vectors of a block."""

    def define(name: str, value: str) -> None:
        code(f"{VECTOR[loop.body.types[name].dtype]} {loop.names[name]}[COUNT];")
        code(f"EACH {operand_of(name, loop)} = {value};")

    for name in () if stage.any_order else stage.loads:
        define(name, _load(name, loop))
    for name in stage.restored:
        define(name, f"read_f32(kept[{kept[name]}] + e + i * FLOATS, 1, FLOATS)")
    for op in stage.ops:
        if of_vectors := _of_vectors(op, loop):
            code(f"Reals {loop.names[op.output]}[COUNT];")
            code(f"EACH {operand_of(op.output, loop)} = {operand_of(op.inputs[0], loop)};")
            code(f"{of_vectors}<COUNT>({loop.names[op.output]});")
        elif op.output not in stage.direct:
            turn = stage.any_order and primitive(op).dequantizes
            define(op.output, _load_interleaved(op, loop) if turn else value_of(op, loop))
    for op in stage.reductions:
        lanes = f"{loop.names[op.output]}_lanes[{'(g + i) % GROUPS' if loop.across is None else 'e % LANES'}]"
        code(f"EACH {lanes} = {_lanes(op).join}({lanes}, {operand_of(op.inputs[0], loop)}, count);")
    for name in stage.kept:
        code(f"EACH write_f32(kept[{kept[name]}] + e + i * FLOATS, 1, FLOATS, {operand_of(name, loop)});")
    for name in stage.stored:
        if name in loop.clip_counts:
            code(f"EACH {_count_clipped(name, loop, 'count')}")
        code(_quantize_and_store(name, loop, stage.any_order) if name in stage.direct else _store(name, loop))


def _of_vectors(op: Op, loop: Loop) -> str:
    """Return the C function that processes several vectors at a time, or "" if there is none for the operator."""
    row = primitive(op)
    return row.c_of_vectors or (row.c_of_nonpositive if op.inputs[0] in loop.schedule.nonpositive else "")


def _lanes(op: Op) -> Lanes:
    lanes = primitive(op).lanes
    if lanes is None:
        raise ValueError(f"{op.kind} is not a reduction of a loop")
    return lanes


def _store_rows(code: Code, loop: Loop) -> None:
    """Print the stores of results that have one value per row."""
    for name in loop.body.outputs:
        if not loop.schedule.along(name):
            value = operand_of(loop.schedule.equal_value(name), loop)
            step, count = (1, "1") if loop.across is None else (loop.schedule.rows.strides[name][loop.across], "count")
            if name in loop.clip_counts:
                code(_count_clipped(name, loop, count))
            place = f"{loop.names[name]}_row, {loop.context.dim(step)}"
            code(f"write_{loop.schedule.operands[name].dtype}({place}, {count}, {value});")


def _load(name: str, loop: Loop) -> str:
    if name in loop.schedule.tables:
        row, place = loop.names[name], f"{loop.names[name]}_found + e + i * FLOATS"
        if loop.schedule.tables[name].inputs[2:]:
            return f"dequantize_row(read_u8({place}, 1, count), {row}_scale, {row}_zero)"
        return f"read_f32({place}, 1, count)"
    return f"read_{loop.schedule.operands[name].dtype}({_elements(name, loop)}, count)"


def _load_interleaved(op: Op, loop: Loop) -> str:
    """Return a load fused with its dequantize, with elements interleaved over the vectors of a block."""
    (name,), q = op.inputs, loop.body.types[op.inputs[0]].qparams
    return f"read_interleaved<COUNT>({loop.names[name]}_row + e, i, count, {zero_point(q)}, {number(q.step)})"


def _store(name: str, loop: Loop) -> str:
    source = loop.schedule.equal_value(name)
    if name in loop.schedule.streamed and source not in loop.schedule.row_values:
        row = f"{loop.names[name]}_row"
        return f"stream_f32<COUNT>({row} + e, count, {loop.names[source]}, {loop.names[name]}_streamed);"
    kind, value = loop.schedule.operands[name].dtype, operand_of(source, loop)
    return f"EACH write_{kind}({_elements(name, loop)}, count, {value});"


def _quantize_and_store(name: str, loop: Loop, interleaved: bool) -> str:
    """Return a store fused with its quantize, of all vectors of a block."""
    strides, q = loop.schedule.rows.strides[name], loop.body.types[name].qparams
    step, (source,) = strides[-1], loop.schedule.producers[name].inputs
    at = f"{loop.names[name]}_row + e" + ("" if step == 1 else f" * {loop.context.dim(step)}")
    stride = loop.context.dim(step if loop.across is None else strides[loop.across])
    inverse, small = numerics.reciprocal(q.step), name in loop.schedule.convertible
    numbers = f"{number(inverse)}, {zero_point(q)}, {q.qmin}, {q.qmax}, {int(small)}, {int(interleaved)}"
    return f"quantize_and_write<COUNT>({at}, {stride}, count, {loop.names[source]}, {numbers});"


def _elements(name: str, loop: Loop) -> str:
    """Return the address of the i-th vector's elements, and their stride."""
    step = loop.schedule.rows.strides[name][-1]
    if loop.across is not None:
        return f"{loop.names[name]}_row + e * {loop.context.dim(step)}, 1"
    place = "e + i * FLOATS" if step == 1 else f"(e + i * FLOATS) * {loop.context.dim(step)}"
    return f"{loop.names[name]}_row + {place}, {loop.context.dim(step)}"
