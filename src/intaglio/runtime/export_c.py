"""A program as C: what a build without Python needs, in one folder.

The texts that are the same for every network lie in native/exported, written for a network called ``net``; what a
program differs in is printed into ``kernels/description.h``. Same model, same bytes.
"""

from __future__ import annotations

import hashlib
import keyword
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from intaglio import config
from intaglio.errors import BuildError, UnsupportedError
from intaglio.ir import Dim, DType, Expression, External, Program, Shape, Signature, c_expression, symbols_of
from intaglio.kernels import ISAS
from intaglio.native.compile import COMPILE_FLAGS
from intaglio.native.cpu import CPU_FLAGS, ISA_FLAGS
from intaglio.native.units import HEADER_FOLDER, included, library_files
from intaglio.ops import needs
from intaglio.output_paths import FOLDER, check_folder, unwritable
from intaglio.runtime import threads
from intaglio.runtime.call_plans import is_image
from intaglio.runtime.coverage import SHOWN_ISLANDS
from intaglio.runtime.model_protocol import CompiledModel
from intaglio.torch_private import pytree

TEMPLATES = HEADER_FOLDER / "exported"
EXPORTED_FILES = ("net.h", "net.cpp", "main.c", "CMakeLists.txt", "README.txt")
THREAD_POOL_INCLUDES = '#include "base/pool.cpp"\n#include "base/image.h"\n'
"""What net.cpp includes of the folder of headers."""

C_FLAGS = tuple(flag for flag in COMPILE_FLAGS if flag not in ("-std=c++17", "-shared", "-fno-rtti"))
"""Those that C and C++ know, for a library of either kind."""

WEIGHTS_VERSION = 1
BLOB_ALIGNMENT = 64
HEADER = struct.Struct("<8s4Q24x")
"""Of weights.bin, ``Header`` in net.cpp: magic, version, key of the export, bytes of the file, sum of the rest."""

SLACK = 64
"""Bytes behind the last constant that vectors may read."""


def export_c(model: CompiledModel, folder: str | Path, isas: Sequence[str] | None) -> None:
    """Write sources, header, weights and build files for these instruction sets (default: the model's own).

    Raises `UnsupportedError` for what C cannot run, `BuildError` for instruction sets there are none of, and
    `ArtifactError` when the folder cannot be written.
    """
    _check(model)
    check_folder(folder)
    programs = [model.program_for(isa) for isa in _ordered(model, isas)]
    name, weights = _name(model.about.name), _weights([program.constants for program in programs])
    kernels = {path: text for program in programs for path, text in _program_texts(program, name).items()}
    values, texts = _values(model, programs, tuple(kernels), name), dict[str, str]()
    for path in EXPORTED_FILES:
        text = _named((TEMPLATES / path).read_text(encoding="utf-8"), name)
        texts[_named(path, name)] = re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)
    texts["kernels/description.h"] = _description(model, programs, weights, name)
    native = included(THREAD_POOL_INCLUDES + "".join(kernels.values()))
    for path, text in {**kernels, **native}.items():
        texts[f"kernels/{Path(path).name}"] = re.sub(r'(#include ")\w+/', r"\1", text)
    _write(Path(folder), {**{path: text.encode() for path, text in texts.items()}, "weights.bin": weights})


# ---- what can be exported -------------------------------------------------------------------------------------------


def _check(model: CompiledModel) -> None:
    """`UnsupportedError` that names what only Python can run, and what would make it native."""
    name, signature, coverage = model.about.name, model.signature, model.coverage
    if model.islands:
        parts = [f"\n    {part}" for part in coverage.floats[:SHOWN_ISLANDS]] + ["\n    ..."] * (
            len(coverage.floats) > SHOWN_ISLANDS
        )
        raise UnsupportedError(
            name,
            None,
            "float parts run in PyTorch, and an exported program has none:" + "".join(parts),
            remedy="write them with operators of docs/reference/operators.md, which run in the program (also those "
            "that stay float with skip=), or quantize the part of the model without them",
        )
    if model.hosts:
        raise UnsupportedError(
            name,
            None,
            f"host operators have a meaning in NumPy and no kernel: {', '.join(model.hosts)}",
            remedy="quantize the part of the model without them",
        )
    if signature.state or signature.written:
        paths = ", ".join([*(kept.path for kept in signature.state), *(f"argument {i}" for i in signature.written)])
        raise UnsupportedError(
            name,
            None,
            f"the model changes what it is given or keeps: {paths}; exported calls only read and return",
            remedy="let the model take that as an input and return the new value",
        )
    written = {external.value for external in model.artifact.program.externals if external.written}
    if missing := [value for value in model.graph.outputs if value not in written]:
        raise UnsupportedError(
            name,
            None,
            f"the program does not compute {', '.join(missing)}: an input or a constant that is returned",
            remedy="return it outside of the model",
        )


def _ordered(model: CompiledModel, isas: Sequence[str] | None) -> list[str]:
    """Best first, as the exported program looks for one that runs."""
    asked = tuple(isas) if isas is not None else (model.artifact.program.isa,)
    if not asked or (unknown := [isa for isa in asked if isa not in ISA_FLAGS]):
        problem = f"no kernels for {', '.join(unknown)}" if asked else "no instruction set"
        raise BuildError(f"isa={asked}", None, f"{problem}; there are {', '.join(ISA_FLAGS)}")
    return [isa for isa in ISA_FLAGS if isa in asked]


# ---- names ----------------------------------------------------------------------------------------------------------


def _name(title: str) -> str:
    """Class of the model -> beginning of all names of its export: lower case."""
    name = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_") or "model"
    return f"model_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _named(text: str, name: str) -> str:
    """A text about ``net``, about the network of this name."""
    return re.sub(r"\bNET(?=_)", name.upper(), re.sub(r"\bnet(?=\b|_)", name, text))


def _output_names(signature: Signature) -> list[str]:
    """Of tensors, by their place in the result: ``logits``, ``boxes.1``; ``output`` of one that is the result."""
    numbered = pytree.tree_unflatten(list(range(len(signature.outputs))), signature.out_tree)
    paths, _ = pytree.tree_flatten_with_path(numbered)
    keys = [
        ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        for path, _ in paths
    ]
    return [key or "output" for key, output in zip(keys, signature.outputs, strict=True) if output.value is not None]


# ---- weights --------------------------------------------------------------------------------------------------------


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each of them begins in the file, and where the last ends."""
    return list(accumulate((_round(array.nbytes) for array in arrays), initial=_round(HEADER.size)))


def _round(size: int) -> int:
    return -(-size // BLOB_ALIGNMENT) * BLOB_ALIGNMENT


def _weights(arrays: Sequence[np.ndarray]) -> bytes:
    starts = _starts(arrays)
    content = bytearray(starts[-1] + SLACK)
    for start, array in zip(starts, arrays, strict=False):
        content[start : start + array.nbytes] = array.tobytes()
    words = np.frombuffer(content, "<u8")[HEADER.size // 8 :]
    total = int((words * (2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64))
    key = int.from_bytes(hashlib.sha256(content).digest()[:8], "little")
    HEADER.pack_into(content, 0, b"intaglio", WEIGHTS_VERSION, key, len(content), total)
    return bytes(content)


# ---- texts ----------------------------------------------------------------------------------------------------------


def _program_texts(program: Program, name: str) -> dict[str, str]:
    """File -> text of a program and of the kernels it calls; names that are linked are this network's own.

    Functions of the library are part of the program's text: they are static in it.
    """
    table = ISAS[program.isa]
    entries = "".join(f"#define intaglio_{entry} {name}_{program.isa}_{entry}\n" for entry in ("run", "plan"))
    bodies = "".join(f'#include "{path}"\n' for path in library_files(program.source))
    text = f"{entries}#define INTAGLIO_ONE_FILE\n{bodies}\n{program.source}"
    kernels = "\n".join(_own_constants(family.name, table.family_text(family)) for family in program.kernels)
    texts = {f"{program.isa}.cpp": text, f"{program.isa}_kernels{table.suffix}": kernels}
    own = {family.name: f"{name}_{program.isa}_{family.name}" for family in program.kernels}
    pattern = re.compile("|".join(rf"\b{table}\b" for table in own) or "(?!)")
    return {path: pattern.sub(lambda match: own[match[0]], text) for path, text in texts.items() if text}


def _own_constants(family: str, text: str) -> str:
    """Families of one file have constants of the same names."""
    return re.sub(r"\bintaglio_(?=\w)", f"{family}_", text)


def _values(model: CompiledModel, programs: Sequence[Program], sources: Sequence[str], name: str) -> dict[str, str]:
    """What stands between @ signs in the texts."""
    isas, several = [program.isa for program in programs], len(programs) > 1
    inputs, outputs = _inputs(model), _outputs(model)
    flags = [
        f'set_source_files_properties(kernels/{path} PROPERTIES COMPILE_OPTIONS "{";".join(_isa_flags(path))}")'
        for path in sources
        if _isa_flags(path)
    ]
    return {
        "TITLE": model.about.name,
        "VERSION": config.VERSION,
        "ISAS": ", ".join(isas),
        "INPUTS": str(len(inputs)),
        "OUTPUTS": str(len(outputs)),
        "RANK": str(_rank(inputs, outputs)),
        "SOURCES": "".join(f" kernels/{path}" for path in sources),
        "FLAGS": " ".join(flag for flag in C_FLAGS if flag not in ("-pthread", "-fPIC")),
        "TARGETS": "\n".join(flags),
        "S": "s" * several,
        "THEY": "they" if several else "it",
        "VERB": "" if several else "s",
        "INPUT_LINES": _value_lines(inputs),
        "OUTPUT_LINES": _value_lines(outputs),
        "RESULT": _result_text(model.signature),
        "COMMANDS": _commands(sources, name),
    }


def _value_lines(values: Sequence[tuple[str, Shape, DType]]) -> str:
    return "".join(f"    {name}: {dtype}{_shape_text(shape)}\n" for name, shape, dtype in values)


def _result_text(signature: Signature) -> str:
    """What the Python call returns, with numbers of outputs for tensors."""
    numbers = iter(range(len(signature.outputs)))
    leaves = [f"output {next(numbers)}" if o.value is not None else str(o.constant) for o in signature.outputs]
    return str(pytree.tree_unflatten(leaves, signature.out_tree)).replace("'", "")


def _isa_flags(path: str) -> tuple[str, ...]:
    """Return the compiler's flags for the text of an instruction set."""
    return ISA_FLAGS[Path(path).stem.removesuffix("_kernels")]


def _commands(sources: Sequence[str], name: str) -> str:
    lines = [f'FLAGS="{" ".join(C_FLAGS)}"', f"gcc $FLAGS -c {name}.cpp main.c"]
    lines += [" ".join(["gcc $FLAGS", *_isa_flags(path), f"-c kernels/{path}"]) for path in sources]
    objects = " ".join(f"{Path(path).stem}.o" for path in sources)
    return "\n".join(f"    {line}" for line in [*lines, f"gcc -pthread {name}.o main.o {objects} -o {name}"])


def _inputs(model: CompiledModel) -> list[tuple[str, Shape, DType]]:
    return [(entry.name, entry.type.shape, entry.type.dtype) for entry in model.signature.inputs]


def _outputs(model: CompiledModel) -> list[tuple[str, Shape, DType]]:
    types = [model.graph.types[value] for value in model.graph.outputs]
    return [(n, t.shape, t.dtype) for n, t in zip(_output_names(model.signature), types, strict=True)]


def _rank(*groups: Sequence[tuple[str, Shape, DType]]) -> int:
    return max([len(shape) for group in groups for _, shape, _ in group] + [1])


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


# ---- kernels/description.h ------------------------------------------------------------------------------------------


def _description(model: CompiledModel, programs: Sequence[Program], weights: bytes, name: str) -> str:
    """Tables and size expressions; net.cpp includes them inside its unnamed namespace."""
    inputs, outputs, symbols = _inputs(model), _outputs(model), programs[0].symbols
    _, _, key, *_ = HEADER.unpack_from(weights)
    numbers = {
        "kSymbols": len(symbols),
        "kInputs": len(inputs),
        "kOutputs": len(outputs),
        "kValues": len(inputs) + len(outputs),
        "kRank": _rank(inputs, outputs),
        "kExternals": len(programs[0].externals),
        "kBuffers": max(program.buffers for program in programs),
        "kSteps": max(len(program.steps) for program in programs),
    }
    constants = {
        "kStep": threads.STEP,
        "kStart": threads.START,
        "kBarrier": threads.BARRIER,
        "kBarrierThread": threads.BARRIER_THREAD,
        "kBytesPerSecond": threads.BYTES_PER_SECOND,
        "kClose": threads.CLOSE,
    }
    blocks = [
        f"// What {name}.cpp must know of the network.",
        "\n".join(f"constexpr int32_t {field} = {value};" for field, value in numbers.items()),
        f"constexpr uint64_t kWeightsVersion = {WEIGHTS_VERSION}, kWeightsKey = {key:#018x};",
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
        *(_amounts(program) for program in programs),
        *(_runs_here(program.isa) for program in programs),
        _program_table(programs, name),
    ]
    return "\n\n".join(blocks) + "\n"


def _value_table(kind: str, values: Sequence[tuple[str, Shape, DType]], prefix: str) -> str:
    lines, rows = [], []
    for index, (name, shape, dtype) in enumerate(values):
        sizes = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in shape) or "0"
        lines.append(f"const int64_t {kind}{index}[] = {{{sizes}}};")
        code = f"{prefix.upper()}_{dtype.value.upper()}"
        rows.append(f'    {{{_c_text(name)}, "{_shape_text(shape)}", {code}, {len(shape)}, {kind}{index}}},')
    return "\n".join([*lines, f"const {prefix}_value {kind}_values[] = {{", *(rows or ["    {},"]), "};"])


def _c_text(name: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\?' and c.isascii() else "_" for c in name) + '"'


def _entry(model: CompiledModel, value: str, as_bytes: bool = False) -> str:
    externals = model.artifact.program.externals
    found = next(((i, external) for i, external in enumerate(externals) if external.value == value), None)
    return "{-1, ANY_STRIDES, 0}" if found is None else f"{{{found[0]}, {_layout(found[1])}, {int(as_bytes)}}}"


def _layout(external: External) -> str:
    """As `Read.readable` and `lies` have it."""
    if is_image(external):
        return "CHANNELS_LAST" if external.dense or external.written else "ANY_STRIDES"
    return "ROW_MAJOR" if external.dense or external.written or len(external.shape) >= 5 else "ANY_STRIDES"


def _entry_table(kind: str, rows: Sequence[str]) -> str:
    return "\n".join([f"const Entry {kind}_entries[] = {{", *(f"    {row}," for row in rows or ["{}"]), "};"])


def _c(dim: Dim) -> str:
    return c_expression(dim, "d_{}", "floor_of({}, {})")


def _dims(used: Iterable[Dim], symbols: Sequence[str]) -> list[str]:
    """Declarations of the free dimensions that expressions read."""
    read = frozenset().union(*map(symbols_of, used))
    return [f"    const int64_t d_{name} = dims[{i}];" for i, name in enumerate(symbols) if name in read]


def _free_sizes(model: CompiledModel, symbols: Sequence[str]) -> str:
    """`dims_of`, and what the graph needs of its sizes."""
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
                lines.append(f"if ({size} != {_c(dim)}) return false;")
            else:
                lines.append("return false;  // nothing says what this size is")
    for name, (low, high) in model.signature.ranges.items():
        if name in known:
            upper = "" if high is None else f" || d_{name} > {high}"
            lines.append(f"if (d_{name} < {low}{upper}) return false;")
    lines += [f"if ({_c(need.value)} < 0) return false;  // {need.problem}" for need in needs(model.graph)]
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
    """Symbol and factor of a dimension that is nothing else."""
    if isinstance(dim, Expression) and len(dim.terms) == 1 and len(dim.terms[0][0]) == 1:
        ((atom,), factor) = dim.terms[0]
        if isinstance(atom, str):
            return atom, factor
    return None


def _output_sizes(shapes: Sequence[Shape], symbols: Sequence[str]) -> str:
    lines = [f"    sizes[{i}][{axis}] = {_c(dim)};" for i, shape in enumerate(shapes) for axis, dim in enumerate(shape)]
    used = [dim for shape in shapes for dim in shape]
    head = "void output_sizes(const int64_t* dims, int64_t (*sizes)[kRank]) {"
    return "\n".join([head, "    (void)dims, (void)sizes;", *_dims(used, symbols), *lines, "}"])


def _amounts(program: Program) -> str:
    works = [step.work for step in program.steps]
    used = [dim for work in works for dim in (work.macs, work.bytes, work.units)]
    lines = [
        f"    steps[{i}][0] = {_c(work.macs)}, steps[{i}][1] = {_c(work.bytes)}, steps[{i}][2] = {_c(work.units)};"
        for i, work in enumerate(works)
    ]
    head = f"void {program.isa}_amounts(const int64_t* dims, Amounts* steps) {{"
    return "\n".join([head, "    (void)dims, (void)steps;", *_dims(used, program.symbols), *lines, "}"])


def _runs_here(isa: str) -> str:
    """By what the processor and the system say."""
    flags = [flag.replace("_vnni", "vnni") for flag in sorted(CPU_FLAGS[isa])]
    tests = " && ".join(f'__builtin_cpu_supports("{flag}")' for flag in flags) or "1"
    return f"int {isa}_runs_here(void) {{ return {tests}; }}"


def _program_table(programs: Sequence[Program], name: str) -> str:
    declared, rows = [], []
    starts = _starts([program.constants for program in programs])
    for start, program in zip(starts, programs, strict=False):
        isa, groups = program.isa, {step.work.barrier_group for step in program.steps}
        declared += [
            f'extern "C" void {name}_{isa}_run(Run*, int segment, int threads, IntaglioParallel parallel);',
            f'extern "C" int64_t {name}_{isa}_plan(const int64_t* dims, int64_t* offsets);',
        ]
        functions = ", ".join([f"{isa}_runs_here", f"{name}_{isa}_run", f"{name}_{isa}_plan", f"{isa}_amounts"])
        barriers, rate = max(len(groups) - 1, 0), threads.MACS_PER_SECOND[isa]
        numbers = f"{len(program.steps)}, {barriers}, {rate!r}, {start}, {program.constants.nbytes}"
        rows.append(f'    {{"{isa}", {functions}, {numbers}}},')
    return "\n".join([*declared, "", "// Best first.", "const Program programs[] = {", *rows, "};"])


def _write(folder: Path, members: Mapping[str, bytes]) -> None:
    try:
        (folder / "kernels").mkdir(parents=True, exist_ok=True)
        for path, content in members.items():
            (folder / path).write_bytes(content)
    except OSError as error:
        raise unwritable(folder, error, FOLDER) from error
