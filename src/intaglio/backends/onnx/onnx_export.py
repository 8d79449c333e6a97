"""Write a reference as an ONNX file of standard operators, QuantizeLinear and DequantizeLinear among them."""

from __future__ import annotations

import ast
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
from intaglio.backends.onnx.ort_residual_qdq import quantize_terms
from intaglio.errors import BuildError, InputError, UnsupportedError
from intaglio.fxgraph.node_info import constant_path, graph_info, info, known_type, origin
from intaglio.ir import Expression, Signature, evaluate, symbols_of
from intaglio.output_paths import check_file
from intaglio.quant.annotate.recurrent_sites import RECURRENT_CALL
from intaglio.quant.qdq.convert import Reference
from intaglio.signature import TORCH_DTYPES
from intaglio.torch_private import pytree

Sums = Literal["levels", "float"]
OPSET = 21
"""The first with levels of 16 and 4 bits and scales for blocks."""
LEAST = 2
"""An example's smallest free dimension: torch.export takes 0 and 1 for constants."""
UNKNOWN = re.compile(r"target=torch\.ops\.([\w.]+)")
"""The operator in what the exporter says of a node it cannot translate."""


@dataclass(frozen=True)
class OnnxFile:
    """What was written. ``inputs``, ``outputs``: name -> element type and shape, in order; ``notes``: what a caller
    should know, one line each."""

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    notes: tuple[str, ...] = ()


def export_onnx(reference: Reference, path: str | Path, sums: Sums) -> OnnxFile:
    """Write the reference as ONNX of opset 21.

    Weights are integers, a quantize and a dequantize is wherever the reference has one, free dimensions have names, and
    nodes are called after the model's modules. Inputs have the names of the model's; an input declared as `Image` takes
    the bytes. Outputs are called after the keys of a nested result; buffers that the model changes are inputs and
    outputs behind all others.

    Args:
        reference: what is written.
        path: the file; tensors of more than 2 GB are beside it, in ``<path>.data``.
        sums: as in `OnnxOptions`.

    Returns:
        The names and types of inputs and outputs, and notes for the caller.

    Raises:
        UnsupportedError: ONNX has no form of an operator; it says where the operator is.
        ArtifactError: no file can be written, which is found out before all work.
    """
    if sums not in get_args(Sums):
        raise InputError("sums", None, f"sums={sums!r}; there are {' and '.join(get_args(Sums))}")
    _require()
    check_file(path)
    module = legalize(reference.module)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    notes: list[str] = []
    if sums == "levels" and (terms := quantize_terms(module)):
        notes.append(f"convolutions in front of sums are rounded to u8 there: {len(terms)}; sums='float' leaves it")
    names = input_names(reference.signature, inputs, notes), output_names(reference.signature, notes)
    if any(str(node.target) == RECURRENT_CALL for node in reference.module.graph.nodes):
        notes.append("recurrent layers are of float32 on integer weights, and hidden states are not rounded")
    written = _translated(_exported(module, inputs), *names)
    _name_dimensions(written.model, inputs)
    _name_nodes(written.model)
    _name_constants(written.model, module)
    written.model.doc_string = "\n".join((*reference.notes, *notes))
    written.save(path)
    graph = written.model.graph
    return OnnxFile(Path(path), _types(graph.inputs), _types(graph.outputs), tuple(notes))


def _types(values: Sequence[Any]) -> dict[str, str]:
    return {str(value.name): f"{value.dtype}{value.shape}" for value in values}


def _require() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise BuildError(
            "onnx backend",
            None,
            f"it needs a package that is not installed: {error.name}",
            remedy="pip install 'intaglio[onnx]'",
        ) from error


# ---- names ----------------------------------------------------------------------------------------------------------


def input_names(signature: Signature, inputs: Sequence[fx.Node], notes: list[str]) -> list[str]:
    """As the signature has them; state behind them, by its path."""
    names = [entry.name for entry in signature.inputs] + [entry.path for entry in signature.state]
    for node, entry in zip(inputs, signature.inputs, strict=False):
        if known_type(node).dtype is not entry.type.dtype:
            notes.append(f"input '{entry.name}': u8, the bytes of its images")
    for path in (kept.path for kept in signature.state):
        notes.append(f"buffer '{path}': an input, and '{path}_after' an output; hand it on from call to call")
    return names


def output_names(signature: Signature, notes: list[str]) -> list[str]:
    """After the keys of the result: ``logits``, ``pair_0``; ``output`` where there is one, ``output_0`` in a tuple."""
    names = []
    leaves = pytree.tree_unflatten(list(range(len(signature.outputs))), signature.out_tree)
    paths = [path for path, _ in pytree.tree_flatten_with_path(leaves)[0]]
    for path, output in zip(paths, signature.outputs, strict=True):
        keys = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key)))) for key in path]
        name = "_".join(keys if keys and not keys[0].isdigit() else ["output", *keys])
        if output.value is None:
            notes.append(f"result '{name}' is left out: it is no tensor but {output.constant!r}")
        else:
            names.append(name)
    if any(len(path) > 1 for path in paths):
        notes.append(f"the result is nested; its tensors in order: {', '.join(names)}")
    for leaf in signature.written:
        names.append(f"{next(entry.name for entry in signature.inputs if entry.leaf == leaf)}_after")
        notes.append(f"output '{names[-1]}': what the model writes into that input")
    return [*names, *[f"{entry.path}_after" for entry in signature.state]]


def _name_dimensions(model: Any, inputs: Sequence[fx.Node]) -> None:
    """The exporter's symbols -> those of the captured model, in every shape."""
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
    """A size, or an expression of symbols, in the model's own names."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), size) if isinstance(size, str) else size


def _values(model: Any) -> Iterator[Any]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _name_nodes(model: Any) -> None:
    """``layer1.0.conv2/Conv``: the module, then the operator. What the exporter kept for itself goes."""
    taken: Counter[str] = Counter()
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        place = "/".join([*[scope for scope in scopes[:-1] if scope][-1:], node.op_type])
        taken[place] += 1
        node.name = place if taken[place] == 1 else f"{place}_{taken[place]}"
        node.metadata_props.clear()


def _name_constants(model: Any, module: fx.GraphModule) -> None:
    """Parameters are called as in the float model, their scales and zero points after them; int4 becomes int4."""
    import onnx_ir as ir

    graph = model.graph
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        value = graph.initializers.get(f"{PREFIX}{node.target}")
        if value is None:
            continue
        if info(node).int4:
            levels = value.const_value.numpy()
            value.const_value = ir.Tensor(levels.astype(ir.DataType.INT4.numpy()), name=value.name)
            value.dtype = ir.DataType.INT4
        name = constant_path(node, value.name)
        if name not in graph.initializers:
            graph.initializers.pop(value.name)
            value.name = name
            graph.initializers[name] = value


# ---- the way through torch's exporter -------------------------------------------------------------------------------

PREFIX = "module."
"""Of constants, in the program that is exported."""


class _TracedGraph(nn.Module):
    """Runs a graph node by node, so that what is traced keeps what is said of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> Any:
        return fx.Interpreter(self.module).run(*inputs)


def _exported(module: fx.GraphModule, inputs: Sequence[fx.Node]) -> ExportedProgram:
    """The graph as torch.export has it, module paths where the exporter looks for them."""
    kinds = [known_type(node) for node in inputs]
    sizes: dict[str, int] = {}
    for name in sorted(set().union(*[symbols_of(dim) for kind in kinds for dim in kind.shape])):
        size = max(graph_info(module).sizes.get(name, LEAST), LEAST)
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
    """torch's `ONNXProgram`."""
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
    """The exporter's error as ours: which operator, of which module. It may be one that torch's own is made of."""
    reason: BaseException | None = error
    while reason is not None and not (found := UNKNOWN.search(str(reason))):
        reason = reason.__cause__
    name = found[1] if reason is not None and found else ""
    own = name.split(".")[1] if "." in name else name  # prims.erf of aten.special_erf
    nodes = [node for node in program.graph.nodes if own and own in str(node.target)]
    paths = [node.meta.get("custom", {}).get("path", "") for node in nodes]
    return UnsupportedError(
        next(iter(paths), "") or "model",
        name or None,
        "there are no ONNX operators for it",
        remedy="write this part of the model with other operators, or export what is in front of it and behind it",
    )
