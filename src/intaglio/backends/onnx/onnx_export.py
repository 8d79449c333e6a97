"""Export of a reference to an ONNX file of standard operators, QuantizeLinear and DequantizeLinear among them."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.fx import traceback

from intaglio.backends.onnx.onnx_legalize import legalize
from intaglio.backends.onnx.onnx_ops import translations
from intaglio.backends.onnx.ort_residual_qdq import quantize_residual_operands
from intaglio.errors import BuildError, InputError, UnsupportedError, did_you_mean
from intaglio.fxgraph.node_info import constant_path, graph_info, info, known_type, origin
from intaglio.ir import Expression, Signature, evaluate, symbols_of
from intaglio.output_paths import check_file, replace_file_by
from intaglio.quant.annotate.recurrent_sites import RECURRENT_CALL
from intaglio.quant.qdq.convert import Reference
from intaglio.signature import TORCH_DTYPES
from intaglio.torch_private import pytree

Sums = Literal["uint8", "float"]
OPSET = 21
"""The first opset with 16-bit and 4-bit quantized values and block-wise scales."""
MIN_DYNAMIC_SIZE = 2
"""Smallest size of a dynamic dimension in an example, because torch.export specializes 0 and 1."""
UNKNOWN_OPERATOR = re.compile(r"target=torch\.ops\.([\w.]+)")
"""Matches the operator in the exporter's message about a node that it cannot translate."""


@dataclass(frozen=True)
class OnnxFile:
    """Description of a written ONNX file.

    Attributes:
        path: the file.
        inputs: element type and shape of every input by name, in order.
        outputs: element type and shape of every output by name, in order.
        notes: remarks for the caller, one line each.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    notes: tuple[str, ...] = ()


def export_onnx(reference: Reference, path: str | Path, sums: Sums) -> OnnxFile:
    """Write a reference as an ONNX file of opset 21.

    Weights are integers, a QuantizeLinear and a DequantizeLinear is wherever the reference has one, dynamic dimensions
    have names, and nodes are named after the model's modules. Inputs are named after the model's arguments; an input
    declared as `Image` accepts bytes. Outputs are named after the keys of a nested result. Mutable buffers are
    additional inputs and outputs after all others.

    Args:
        reference: the reference model.
        path: the file. Tensors of more than 2 GB are stored next to it, in ``<path>.data``.
        sums: as in `OnnxOptions`.

    Returns:
        Names and types of inputs and outputs, and notes for the caller.

    Raises:
        UnsupportedError: ONNX has no equivalent of an operator; the error says where the operator is.
        ArtifactError: the file cannot be written, which is checked first.
        BuildError: the packages onnx and onnxscript are not installed.
        InputError: ``sums`` has another value than the two.
    """
    if sums not in get_args(Sums):
        problem = f"{sums!r} is not a value of sums; allowed are {' and '.join(map(repr, get_args(Sums)))}"
        raise InputError("sums", None, problem, remedy=did_you_mean(sums, get_args(Sums)))
    _require()
    check_file(path)
    module = legalize(reference.module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    notes: list[str] = []
    if sums == "uint8" and (terms := quantize_residual_operands(module)):
        rounded = f"results of {len(terms)} convolutions are rounded to u8 before they are added"
        notes.append(f"{rounded}; sums='float' keeps them in float32")
    names = input_names(reference.signature, inputs, notes), output_names(reference.signature, notes)
    if any(str(node.target) == RECURRENT_CALL for node in reference.module.graph.nodes):
        notes.append("recurrent layers run in float32 with quantized weights; their hidden states are not rounded")
    written = _translated(_exported(module, inputs), *names)
    _name_dimensions(written.model, inputs)
    _name_nodes(written.model)
    _name_constants(written.model, module)
    written.model.doc_string = "\n".join((*reference.notes, *notes))
    replace_file_by(path, written.save)
    graph = written.model.graph
    return OnnxFile(Path(path), _types(graph.inputs), _types(graph.outputs), tuple(notes))


def _types(values: Sequence[Any]) -> dict[str, str]:
    return {str(value.name): f"{value.dtype}{value.shape}" for value in values}


def _require() -> None:
    """Raise `BuildError` if a package that the ONNX backend needs is not installed."""
    try:
        for package in ("onnx", "onnxscript"):
            importlib.import_module(package)
    except ImportError as error:
        raise BuildError(
            "the ONNX backend",
            None,
            f"the package {error.name} is not installed",
            remedy="install it with pip install 'intaglio[onnx]'",
        ) from error


# ---- names ----------------------------------------------------------------------------------------------------------


def input_names(signature: Signature, inputs: Sequence[fx.Node], notes: list[str]) -> list[str]:
    """Return the names of inputs from the signature, then the paths of mutable buffers. Append remarks to ``notes``."""
    names = [entry.name for entry in signature.inputs] + [entry.path for entry in signature.state]
    for node, entry in zip(inputs, signature.inputs, strict=False):
        if known_type(node).dtype is not entry.type.dtype:
            notes.append(f"input '{entry.name}': u8, the bytes of its images")
    for path in (kept.path for kept in signature.state):
        notes.append(f"buffer '{path}': an input, and '{path}_after' an output; pass this output to the next call")
    return names


def output_names(signature: Signature, notes: list[str]) -> list[str]:
    """Return the names of outputs from the keys of the result: ``logits``, ``pair_0``, ``output`` for a single result,
    or ``output_0`` in a tuple. Append remarks to ``notes``."""
    names = []
    leaves = pytree.tree_unflatten(list(range(len(signature.outputs))), signature.out_tree)
    paths = [path for path, _ in pytree.tree_flatten_with_path(leaves)[0]]
    for path, output in zip(paths, signature.outputs, strict=True):
        keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path]
        name = "_".join(keys if keys and not keys[0].isdigit() else ["output", *keys])
        if output.value is None:
            notes.append(f"result '{name}' is left out: it is not a tensor but {output.constant!r}")
        else:
            names.append(name)
    if any(len(path) > 1 for path in paths):
        notes.append(f"the result is nested; its tensors in order: {', '.join(names)}")
    for leaf in signature.updated_inputs:
        names.append(f"{next(entry.name for entry in signature.inputs if entry.leaf == leaf)}_after")
        notes.append(f"output '{names[-1]}': the new contents of that input")
    return [*names, *[f"{entry.path}_after" for entry in signature.state]]


def _name_dimensions(model: Any, inputs: Sequence[fx.Node]) -> None:
    """Rename the exporter's symbols to those of the captured model in every shape."""
    import onnx_ir as ir

    names: dict[str, str] = {}
    for node, value in zip(inputs, model.graph.inputs, strict=True):
        for dim, size in zip(known_type(node).shape, value.shape, strict=True):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                names.setdefault(size.value, str(dim))
    for value in _values(model):
        if value.shape is not None:
            sizes = [size if isinstance(size, int) else size.value for size in value.shape]
            value.shape = ir.Shape([_renamed(size, names) for size in sizes])


def _renamed(size: Any, names: Mapping[str, str]) -> Any:
    """Return a size, or an expression of symbols, with the model's own symbols."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), size) if isinstance(size, str) else size


def _values(model: Any) -> Iterator[Any]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _name_nodes(model: Any) -> None:
    """Rename nodes after module and operator, as in ``layer1.0.conv2/Conv``, and remove the exporter's metadata."""
    taken: Counter[str] = Counter()
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        place = "/".join([*[scope for scope in scopes[:-1] if scope][-1:], node.op_type])
        taken[place] += 1
        node.name = place if taken[place] == 1 else f"{place}_{taken[place]}"
        node.metadata_props.clear()


def _name_constants(model: Any, module: fx.GraphModule) -> None:
    """Rename constants like the float model's parameters, with suffixes for scales and zero points, and store 4-bit
    weights as INT4."""
    import onnx_ir as ir

    graph = model.graph
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = graph.initializers.get(f"{PREFIX}{node.target}")
        if value is None:
            continue
        if info(node).int4:
            quantized = value.const_value.numpy()
            value.const_value = ir.Tensor(quantized.astype(ir.DataType.INT4.numpy()), name=value.name)
            value.dtype = ir.DataType.INT4
        name = constant_path(node, value.name)
        if name not in graph.initializers:
            graph.initializers.pop(value.name)
            value.name = name
            graph.initializers[name] = value


# ---- torch's exporter -----------------------------------------------------------------------------------------------

PREFIX = "module."
"""Prefix of the names of constants in the exported program."""


class _TracedGraph(nn.Module):
    """Runs a graph node by node, so that the traced nodes keep the metadata of the nodes they come from."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        return fx.Interpreter(self.module).run(*inputs)


def _exported(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> ExportedProgram:
    """Return the program that torch.export makes of the graph, with module paths at the place where the ONNX exporter
    looks for them."""
    kinds = [known_type(node) for node in inputs]
    sizes: dict[str, int] = {}
    for name in sorted(set().union(*[symbols_of(dim) for kind in kinds for dim in kind.shape])):
        size = max(graph_info(module).sizes.get(name, MIN_DYNAMIC_SIZE), MIN_DYNAMIC_SIZE)
        while size in sizes.values():
            size += 1
        sizes[name] = size
    example = [torch.zeros([evaluate(dim, sizes) for dim in k.shape], dtype=TORCH_DTYPES[k.dtype]) for k in kinds]
    free = [{i: Dim.AUTO for i, dim in enumerate(k.shape) if isinstance(dim, Expression)} for k in kinds]
    for node in module.graph.nodes:
        node.meta["custom"] = {"path": origin(node).path, "source": origin(node).source}
    with torch.no_grad(), traceback.preserve_node_meta():
        program = torch.export.export(_TracedGraph(module), tuple(example), dynamic_shapes=(tuple(free),), strict=False)
    for node in program.graph.nodes:
        node.meta["nn_module_stack"] = {"": (node.meta.get("custom", {}).get("path", ""), nn.Module)}
    return program


def _translated(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Return torch's `ONNXProgram` with these names of inputs and outputs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=inputs,
                output_names=outputs,
                custom_translation_table=translations(),
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise _refusal(program, error) from error


def _refusal(program: ExportedProgram, error: BaseException) -> UnsupportedError:
    """Return an `UnsupportedError` for an exporter error, with the operator and its module. The exporter may name an
    operator that the model's operator was decomposed into."""
    reason: BaseException | None = error
    while reason is not None and not (found := UNKNOWN_OPERATOR.search(str(reason))):
        reason = reason.__cause__
    name = found[1] if reason is not None and found else ""
    own = name.split(".")[1] if "." in name else name  # for example prims.erf for aten.special_erf
    nodes = [node for node in program.graph.nodes if own and own in str(node.target)]
    paths = [node.meta.get("custom", {}).get("path", "") for node in nodes]
    return UnsupportedError(
        next(iter(paths), "") or "model",
        name or None,
        "no ONNX operators compute it",
        remedy="write this part of the model with other operators, or export the parts before and after it",
    )
