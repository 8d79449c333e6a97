"""Generated tables of exported C: tensors, size expressions, costs of steps and programs of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from intaglio.ir import Dim, DType, Expression, External, Program, Shape, Signature, c_expression, symbols_of
from intaglio.native.cpu import CPU_FLAGS
from intaglio.ops import needs
from intaglio.runtime.calls import threads
from intaglio.runtime.export_weights import HEADER, PADDING_BYTES, WEIGHTS_VERSION, array_offsets, weights_digest
from intaglio.runtime.model_protocol import CompiledModel
from intaglio.torch_private import pytree

AARCH64_BITS = {"asimddp": ("AT_HWCAP", 20), "i8mm": ("AT_HWCAP2", 13)}
"""Flag -> entry of the auxiliary vector that Linux passes to programs, and its bit there."""


def inputs_of(model: CompiledModel) -> list[tuple[str, Shape, DType]]:
    """Return name, shape and element type of each input."""
    return [(entry.name, entry.type.shape, entry.type.dtype) for entry in model.signature.inputs]


def outputs_of(model: CompiledModel) -> list[tuple[str, Shape, DType]]:
    """Return name, shape and element type of each output."""
    types = [model.graph.types[value] for value in model.graph.outputs]
    return [(n, t.shape, t.dtype) for n, t in zip(_output_names(model.signature), types, strict=True)]


def largest_rank(*groups: Sequence[tuple[str, Shape, DType]]) -> int:
    """Return the largest rank of all tensors, at least 1."""
    return max([len(shape) for group in groups for _, shape, _ in group] + [1])


def shape_text(shape: Shape) -> str:
    """Return a shape as ``[1, 3, s0]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def _output_names(signature: Signature) -> list[str]:
    """Return the names of output tensors from their position in the result: ``logits``, ``boxes.1``, or ``output`` if
    the result is a single tensor."""
    numbered = pytree.tree_unflatten(list(range(len(signature.outputs))), signature.out_tree)
    paths, _ = pytree.tree_flatten_with_path(numbered)
    keys = [
        ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        for path, _ in paths
    ]
    return [key or "output" for key, output in zip(keys, signature.outputs, strict=True) if output.value is not None]


def description(model: CompiledModel, programs: Sequence[Program], weights: bytes, name: str) -> str:
    """Return the text of ``kernels/description.h``: tables and size expressions that net.cpp includes in its unnamed
    namespace."""
    inputs, outputs, symbols = inputs_of(model), outputs_of(model), programs[0].symbols
    _, _, key, *_ = HEADER.unpack_from(weights)
    numbers = {
        "kSymbols": len(symbols),
        "kInputs": len(inputs),
        "kOutputs": len(outputs),
        "kValues": len(inputs) + len(outputs),
        "kRank": largest_rank(inputs, outputs),
        "kExternals": len(programs[0].externals),
        "kBuffers": max(program.buffers for program in programs),
        "kSteps": max(len(program.steps) for program in programs),
    }
    constants = {
        "kStep": threads.STEP_SECONDS,
        "kStart": threads.START_SECONDS,
        "kBarrier": threads.BARRIER_SECONDS,
        "kBarrierThread": threads.BARRIER_SECONDS_PER_THREAD,
        "kBytesPerSecond": threads.BYTES_PER_SECOND,
        "kClose": threads.TIME_TOLERANCE,
    }
    blocks = [
        f"// What {name}.cpp must know of the network.",
        "\n".join(f"constexpr int32_t {field} = {value};" for field, value in numbers.items()),
        f"constexpr uint64_t kWeightsVersion = {WEIGHTS_VERSION}, kWeightsKey = {key:#018x};\n"
        f"constexpr size_t kWeightsBytes = {len(weights)};",
        _digest_constant(weights),
        "// Seconds, and what a thread does in one.\n"
        + "\n".join(f"constexpr double {field} = {value!r};" for field, value in constants.items()),
        _value_table("input", inputs, name),
        _value_table("output", outputs, name),
        _entry_table(
            "input",
            [_entry(model, value, i in model.graph.byte_inputs()) for i, value in enumerate(model.graph.inputs)],
        ),
        _entry_table("output", [_entry(model, value) for value in model.graph.outputs]),
        "int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0); }",
        _free_sizes(model, symbols),
        _output_sizes([shape for _, shape, _ in outputs], symbols),
        *(_cost_function(program) for program in programs),
        *(_cpu_test(program.isa) for program in programs),
        _program_table(programs, name),
    ]
    return "\n\n".join(blocks) + "\n"


def _digest_constant(weights: bytes) -> str:
    digest = ", ".join(f"0x{byte:02x}" for byte in weights_digest(weights))
    return f"// BLAKE2b of the whole file.\nconstexpr uint8_t kWeightsDigest[32] = {{{digest}}};"


def _value_table(kind: str, values: Sequence[tuple[str, Shape, DType]], prefix: str) -> str:
    """Return the C table of the names, shapes and element types of inputs or outputs."""
    lines, rows = [], []
    for index, (name, shape, dtype) in enumerate(values):
        sizes = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in shape) or "0"
        lines.append(f"const int64_t {kind}{index}[] = {{{sizes}}};")
        code = f"{prefix.upper()}_{dtype.value.upper()}"
        rows.append(f'    {{{_c_text(name)}, "{shape_text(shape)}", {code}, {len(shape)}, {kind}{index}}},')
    return "\n".join([*lines, f"const {prefix}_value {kind}_values[] = {{", *(rows or ["    {},"]), "};"])


def _c_text(name: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\?' and c.isascii() else "_" for c in name) + '"'


def _entry(model: CompiledModel, value: str, as_bytes: bool = False) -> str:
    externals = model.artifact.program.externals
    found = next(((i, external) for i, external in enumerate(externals) if external.value == value), None)
    return "{-1, ANY_STRIDES, 0}" if found is None else f"{{{found[0]}, {_layout(found[1])}, {int(as_bytes)}}}"


def _layout(external: External) -> str:
    """Return the layout that the program expects, in accordance with `runtime.calls.call_plans`."""
    if external.is_image:
        return "CHANNELS_LAST" if external.dense or external.is_output else "ANY_STRIDES"
    return "ROW_MAJOR" if external.dense or external.is_output or len(external.shape) >= 5 else "ANY_STRIDES"


def _entry_table(kind: str, rows: Sequence[str]) -> str:
    return "\n".join([f"const Entry {kind}_entries[] = {{", *(f"    {row}," for row in rows or ["{}"]), "};"])


def _c_expression(dim: Dim) -> str:
    return c_expression(dim, "d_{}", "floor_of({}, {})")


def _dims(used: Iterable[Dim], symbols: Sequence[str]) -> list[str]:
    """Return declarations of the dynamic dimensions that the expressions use."""
    read = frozenset().union(*map(symbols_of, used))
    return [f"    const int64_t d_{name} = dims[{i}];" for i, name in enumerate(symbols) if name in read]


def _free_sizes(model: CompiledModel, symbols: Sequence[str]) -> str:
    """Return the C++ function that computes dynamic dimensions and checks sizes, the counterpart of `dims_of`."""
    lines, known = [], set[str]()
    for index, entry in enumerate(model.signature.inputs):
        for axis, dim in enumerate(entry.type.shape):
            size = f"sizes[{index}][{axis}]"
            if (found := _single(dim)) is not None and found[0] not in known:
                name, factor = found
                if factor != 1:
                    lines.append(f"if ({size} % {factor}) return false;")
                lines.append(f"const int64_t d_{name} = {size}{f' / {factor}' if factor != 1 else ''};")
                known.add(name)
            elif symbols_of(dim) <= known:
                lines.append(f"if ({size} != {_c_expression(dim)}) return false;")
            else:
                lines.append("return false;  // nothing says what this size is")
    for name, (low, high) in model.signature.ranges.items():
        if name in known:
            upper = "" if high is None else f" || d_{name} > {high}"
            lines.append(f"if (d_{name} < {low}{upper}) return false;")
    for one in model.signature.conditions:
        left, right = map(_c_expression, (one.left, one.right))
        lines.append(f"if (!({left} {one.relation} {right})) return false;")
    lines += [f"if ({_c_expression(need.value)} < 0) return false;  // {need.problem}" for need in needs(model.graph)]
    lines += [f"dims[{i}] = d_{name};" for i, name in enumerate(symbols) if name in known]
    return "\n".join(
        [
            "// Free dimensions of a call; false if it has sizes that the network does not take.",
            "bool free_sizes(const int64_t (*sizes)[kRank], int64_t* dims) {",
            "    (void)sizes, (void)dims;",
            *(f"    {line}" for line in lines),
            "    return true;",
            "}",
        ]
    )


def _single(dim: Dim) -> tuple[str, int] | None:
    """Return symbol and factor if a dimension is a symbol times a constant, else ``None``."""
    if isinstance(dim, Expression) and len(dim.terms) == 1 and len(dim.terms[0][0]) == 1:
        ((atom,), factor) = dim.terms[0]
        if isinstance(atom, str):
            return atom, factor
    return None


def _output_sizes(shapes: Sequence[Shape], symbols: Sequence[str]) -> str:
    lines = [
        f"    sizes[{i}][{axis}] = {_c_expression(dim)};"
        for i, shape in enumerate(shapes)
        for axis, dim in enumerate(shape)
    ]
    used = [dim for shape in shapes for dim in shape]
    head = "void output_sizes(const int64_t* dims, int64_t (*sizes)[kRank]) {"
    return "\n".join([head, "    (void)dims, (void)sizes;", *_dims(used, symbols), *lines, "}"])


def _cost_function(program: Program) -> str:
    """Return the C function that computes MACs, bytes and units of every step."""
    costs = [step.cost for step in program.steps]
    used = [dim for cost in costs for dim in (cost.macs, cost.bytes, cost.units)]
    lines = [
        f"    steps[{i}][0] = {_c_expression(cost.macs)}, steps[{i}][1] = {_c_expression(cost.bytes)}, "
        f"steps[{i}][2] = {_c_expression(cost.units)};"
        for i, cost in enumerate(costs)
    ]
    head = f"void {program.isa}_amounts(const int64_t* dims, Amounts* steps) {{"
    return "\n".join([head, "    (void)dims, (void)steps;", *_dims(used, program.symbols), *lines, "}"])


def _cpu_test(isa: str) -> str:
    """Return the C function that tests whether the processor and the operating system support an instruction set."""
    tests = " && ".join(dict.fromkeys(_flag_test(flag) for flag in sorted(CPU_FLAGS[isa], reverse=True))) or "1"
    return f"int {isa}_runs_here(void) {{ return {tests}; }}"


def _flag_test(flag: str) -> str:
    """Return the C expression that tests for a flag of /proc/cpuinfo."""
    if (place := AARCH64_BITS.get(flag)) is not None:
        return "(getauxval({}) >> {} & 1)".format(*place)
    if flag.startswith("amx"):
        return "may_use_tiles()"
    return f'__builtin_cpu_supports("{flag.replace("_vnni", "vnni")}")'


def _program_table(programs: Sequence[Program], name: str) -> str:
    """Return the C table of the programs of all instruction sets, best first."""
    declared, rows = [], []
    starts = array_offsets([program.constants for program in programs])
    for start, program in zip(starts, programs, strict=False):
        isa, groups = program.isa, {step.cost.barrier_group for step in program.steps}
        declared += [
            f'extern "C" void {name}_{isa}_run(Run*, int segment, int threads, IntaglioParallel parallel);',
            f'extern "C" int64_t {name}_{isa}_plan(const int64_t* dims, int64_t* offsets);',
        ]
        functions = ", ".join([f"{isa}_runs_here", f"{name}_{isa}_run", f"{name}_{isa}_plan", f"{isa}_amounts"])
        barriers, rate = max(len(groups) - 1, 0), threads.MACS_PER_SECOND[isa]
        numbers = f"{len(program.steps)}, {barriers}, {rate!r}, {start}, {program.constants.nbytes}"
        rows.append(f'    {{"{isa}", {functions}, {numbers}}},')
        end = start + program.constants.nbytes + PADDING_BYTES
        declared.append(f'static_assert({end} <= kWeightsBytes, "the constants are inside of the weights");')
    return "\n".join([*declared, "", "// Best first.", "const Program programs[] = {", *rows, "};"])
