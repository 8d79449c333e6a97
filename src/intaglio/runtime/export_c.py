"""Export of a program as C sources: one folder with everything that a build without Python needs.

The files that are the same for every network are in native/exported, written for a network called ``net``. Everything
specific to a program is generated into ``kernels/description.h``. The same model always gives the same bytes.
"""

from __future__ import annotations

import itertools
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from intaglio import config
from intaglio.errors import BuildError, UnsupportedError, did_you_mean
from intaglio.ir import DType, Program, Shape, Signature
from intaglio.kernels import ISAS
from intaglio.native.cpu import AARCH64, ISA_FLAGS, IsaName
from intaglio.native.toolchain import COMPILE_FLAGS
from intaglio.native.units import HEADER_FOLDER, included, library_files
from intaglio.output_paths import check_folder, expanded
from intaglio.runtime.export_description import description, inputs_of, largest_rank, outputs_of, shape_text
from intaglio.runtime.export_files import write_exported_files
from intaglio.runtime.export_weights import weights_file
from intaglio.runtime.model_protocol import CompiledModel
from intaglio.runtime.reports.coverage import SHOWN_ISLANDS
from intaglio.torch_private import pytree

TEMPLATES = HEADER_FOLDER / "exported"
EXPORTED_FILES = (
    "net.h",
    "net.cpp",
    "kernels/blake2b.h",
    "kernels/tensor_copies.h",
    "main.c",
    "net.py",
    "CMakeLists.txt",
    "README.txt",
)
THREAD_POOL_INCLUDES = '#include "base/pool.cpp"\n#include "base/image.h"\n'
"""Library headers that net.cpp includes."""

RESULT_PLACEHOLDER = "outputs  # replaced when a network is exported"
"""The expression in net.py that is replaced by the result: with it, the template is valid Python."""

C_FLAGS = tuple(flag for flag in COMPILE_FLAGS if flag not in ("-std=c++17", "-shared", "-fno-rtti"))
"""Compiler flags that C and C++ share, for static and shared libraries."""


def export_c(model: CompiledModel, folder: str | Path, isas: Sequence[str] | None) -> None:
    """Write sources, header, weights and build files.

    Args:
        model: the compiled model.
        folder: the folder, which is created if it does not exist. A leading "~" is the home folder.
        isas: instruction sets (default: the model's own).

    Raises:
        UnsupportedError: parts of the model run in Python.
        BuildError: an instruction set does not exist, or none is given.
        ArtifactError: the folder cannot be written.
    """
    _check(model)
    folder = expanded(folder)
    check_folder(folder)
    programs = [model.program_for(isa) for isa in _ordered(model, isas)]
    name, weights = _name(model.model_info.name), weights_file([program.constants for program in programs])
    kernels = {path: text for program in programs for path, text in _program_texts(program, name).items()}
    values, texts = _values(model, programs, tuple(kernels), name), dict[str, str]()
    result = _result_expression(_result_structure(model.signature, "outputs[{}]".format))
    for path in EXPORTED_FILES:
        text = _named((TEMPLATES / path).read_text(encoding="utf-8"), name)
        text = re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)
        texts[_named(path, name)] = text.replace(RESULT_PLACEHOLDER, result)
    texts["kernels/description.h"] = description(model, programs, weights, name)
    native = included(THREAD_POOL_INCLUDES + "".join(kernels.values()))
    for path, text in {**kernels, **native}.items():
        texts[f"kernels/{Path(path).name}"] = re.sub(r'(#include ")\w+/', r"\1", text)
    write_exported_files(folder, {**{path: text.encode() for path, text in texts.items()}, "weights.bin": weights})


# ---- supported models -----------------------------------------------------------------------------------------------


def _check(model: CompiledModel) -> None:
    """Raise `UnsupportedError` for parts that only Python can run. The error names them and says how to make them
    native."""
    name, signature, coverage = model.model_info.name, model.signature, model.coverage
    if model.islands:
        parts = [f"\n    {part}" for part in coverage.floats[:SHOWN_ISLANDS]] + ["\n    ..."] * (
            len(coverage.floats) > SHOWN_ISLANDS
        )
        raise UnsupportedError(
            name,
            None,
            "these float parts run in PyTorch, which an exported program does not have:" + "".join(parts),
            remedy="write them with operators of docs/reference/operators.md, which run in the program even if skip= "
            "leaves them in float, or quantize only the part of the model without them",
        )
    if model.hosts:
        raise UnsupportedError(
            name,
            None,
            f"user-defined operators run in NumPy and have no kernel: {', '.join(model.hosts)}",
            remedy="quantize only the part of the model without them",
        )
    if signature.state or signature.updated_inputs:
        paths = ", ".join(
            [*(kept.path for kept in signature.state), *(f"argument {i}" for i in signature.updated_inputs)]
        )
        raise UnsupportedError(
            name,
            None,
            f"the model changes its inputs or buffers ({paths}), which exported programs cannot do",
            remedy="take the value as an input and return the new value as a result",
        )
    written = {external.value for external in model.artifact.program.externals if external.is_output}
    if missing := [value for value in model.graph.outputs if value not in written]:
        raise UnsupportedError(
            name,
            None,
            f"the result {', '.join(missing)} is an input or a constant, which the program does not compute",
            remedy="remove it from the results of the model",
        )


def _ordered(model: CompiledModel, isas: Sequence[str] | None) -> list[str]:
    """Return the instruction sets, best first, in the order in which the exported program tries them."""
    requested = tuple(isas) if isas is not None else (model.artifact.program.isa,)
    if not requested or (unknown := [isa for isa in requested if isa not in ISA_FLAGS]):
        problem = (
            f"there are no kernels for {', '.join(map(str, unknown))}" if requested else "no instruction set is given"
        )
        remedy = did_you_mean(unknown[0], ISA_FLAGS) if requested else None
        raise BuildError(f"isa={requested}", None, f"{problem}; allowed are {', '.join(ISA_FLAGS)}", remedy=remedy)
    if len({isa in AARCH64 for isa in requested if isa != IsaName.PORTABLE}) > 1:
        problem = "one export cannot have kernels for both x86-64 and AArch64"
        raise BuildError(f"isa={requested}", None, problem, remedy="export a folder for each kind of processor")
    return [isa for isa in ISA_FLAGS if isa in requested]


# ---- names ----------------------------------------------------------------------------------------------------------


def _name(title: str) -> str:
    """Return the prefix of all names in the export, in lower case, from the class name of the model."""
    name = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_") or "model"
    return f"model_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _named(text: str, name: str) -> str:
    """Return a text about ``net`` with the name of this network instead."""
    return re.sub(r"\bNET(?=_)", name.upper(), re.sub(r"\bnet(?=\b|_)", name, text))


# ---- texts ----------------------------------------------------------------------------------------------------------


def _program_texts(program: Program, name: str) -> dict[str, str]:
    """Return the sources of a program and its kernels by file name.

    Linked names get the prefix of this network. Library functions are static and therefore part of the program's
    source.
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
    """Return the text of a kernel family with a prefix on its constants, whose names would clash in one file."""
    return re.sub(r"\bintaglio_(?=\w)", f"{family}_", text)


def _values(model: CompiledModel, programs: Sequence[Program], sources: Sequence[str], name: str) -> dict[str, str]:
    """Return the replacements of the ``@NAME@`` placeholders in the templates."""
    isas, several = [program.isa for program in programs], len(programs) > 1
    inputs, outputs = inputs_of(model), outputs_of(model)
    flags = [
        f'set_source_files_properties(kernels/{path} PROPERTIES COMPILE_OPTIONS "{";".join(_isa_flags(path))}")'
        for path in sources
        if _isa_flags(path)
    ]
    return {
        "TITLE": model.model_info.name,
        "VERSION": config.VERSION,
        "ISAS": ", ".join(isas),
        "INPUTS": str(len(inputs)),
        "OUTPUTS": str(len(outputs)),
        "RANK": str(largest_rank(inputs, outputs)),
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
    return "".join(f"    {name}: {dtype}{shape_text(shape)}\n" for name, shape, dtype in values)


def _result_text(signature: Signature) -> str:
    """Return the structure of the Python result as text, with numbered outputs for tensors."""
    return str(_result_structure(signature, "output {}".format)).replace("'", "")


class _Expression(str):
    """Python code for a tensor or a constant in a result."""

    __slots__ = ()


def _result_structure(signature: Signature, output: Callable[[int], str]) -> Any:
    """Return the result of the Python model with code for its tensors, made from their numbers, and for constants."""
    numbers = itertools.count()
    leaves = [
        _Expression(output(next(numbers)) if leaf.value is not None else _constant_code(leaf.constant))
        for leaf in signature.outputs
    ]
    return pytree.tree_unflatten(leaves, signature.out_tree)


def _constant_code(value: Any) -> str:
    """Return Python code for a constant in a result: ``None``, a number or a text."""
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _result_expression(structure: Any) -> str:
    """Return Python code for a result, in which named tuples are tuples and all mappings dictionaries. An object of
    another class is the list of all outputs, because its class is not exported."""
    if isinstance(structure, _Expression):
        return str(structure)
    if not isinstance(structure, list | tuple | Mapping):
        return "outputs"
    if isinstance(structure, Mapping):
        return "{" + ", ".join(f"{key!r}: {_result_expression(value)}" for key, value in structure.items()) + "}"
    parts = [_result_expression(value) for value in structure]
    if isinstance(structure, list):
        return f"[{', '.join(parts)}]"
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _isa_flags(path: str) -> tuple[str, ...]:
    """Return the compiler flags for a source file, from the instruction set in its name."""
    return ISA_FLAGS[Path(path).stem.removesuffix("_kernels")]


def _commands(sources: Sequence[str], name: str) -> str:
    lines = [f'FLAGS="{" ".join(C_FLAGS)}"', f"gcc $FLAGS -c {name}.cpp main.c"]
    lines += [" ".join(["gcc $FLAGS", *_isa_flags(path), f"-c kernels/{path}"]) for path in sources]
    objects = " ".join([f"{name}.o", *(f"{Path(path).stem}.o" for path in sources)])
    lines += [f"gcc -shared -pthread {objects} -o lib{name}.so", f"gcc -pthread main.o {objects} -o {name}"]
    return "\n".join(f"    {line}" for line in lines)
