"""Conversion of torch.export metadata: types, module paths and source lines of nodes and constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from intaglio.errors import CaptureError
from intaglio.formatting.source_paths import short_source_path
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import info, set_info, update_info
from intaglio.fxgraph.nodes import dim_of, target_name
from intaglio.ir import Dim, DType, Origin, TensorType
from intaglio.signature import DTYPES


def tensor_of(program: ExportedProgram, target: str) -> torch.Tensor:
    """Return the tensor of the model with this name."""
    return program.state_dict[target] if target in program.state_dict else program.constants[target]


def constant(graph: fx.Graph, root: nn.Module, program: ExportedProgram, target: str) -> fx.Node:
    """Add a tensor of the model as a constant to the root, and return its node."""
    tensor = tensor_of(program, target)
    copy_ = graph.get_attr(add_constant(root, target.replace(".", "_"), tensor.detach()))
    set_info(copy_, type=type_of(tensor, {}), path=target)
    if isinstance(tensor, nn.Parameter):
        update_info(copy_, requires_grad=tensor.requires_grad)
    return copy_


def type_of(value: torch.Tensor, sizes: Mapping[Any, Dim]) -> TensorType:
    """Return shape and element type of a tensor, with named dynamic dimensions."""
    return TensorType(tuple(dim_of(size, sizes) for size in value.shape), DTYPES.get(value.dtype, DType.OTHER))


def describe(copied: fx.Node, node: fx.Node, sizes: Mapping[Any, Dim], program: ExportedProgram) -> None:
    """Record type or dimension, and origin, on the copy of a node."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        update_info(copied, type=type_of(value, sizes))
    elif isinstance(value, torch.SymInt):
        update_info(copied, dim=dim_of(value, sizes))
    if copied.op == "call_function":
        update_info(copied, origin=Origin(path_of(node, program), target_name(node.target), source_of(node)))
        update_info(copied, iteration=info(node).iteration or info(copied).iteration)


def path_of(node: fx.Node, program: ExportedProgram) -> str:
    """Return the module path of a node.

    ``@1`` marks the second call of a module, ``@scan[1]`` the second iteration of a loop. The module that owns a
    parameter takes precedence over the root and over the module around a loop, because torch.export records no modules
    inside loop bodies.
    """
    key, path = _innermost(node)
    if not path or info(node).iteration is not None:
        owners = [program.graph_signature.inputs_to_parameters.get(n.name, "") for n in node.all_input_nodes]
        path = next((owner.rpartition(".")[0] for owner in owners if owner), path)
    if info(node).iteration is not None:
        return f"{path}@{info(node).iteration}"
    return f"{path}@{key.rpartition('@')[2]}" if "@" in key and path else path


def module_around(node: fx.Node) -> str:
    """Return the path of the module whose forward contains the call."""
    return _innermost(node)[1]


def _innermost(node: fx.Node) -> tuple[str, str]:
    """Return key and path of the innermost module as torch.export records it; invented modules give ""."""
    stack = [entry for entry in node.meta.get("nn_module_stack", {}).items() if isinstance(entry[1], tuple)]
    key, (path, _) = stack[-1] if stack else ("", ("", ""))
    return key, "" if path.startswith("_empty") else path


def source_of(node: fx.Node) -> str:
    """Return ``file:line, in function`` of the innermost source line outside of torch.

    The file is a path in a library, in the working directory or in the home folder if it is in one of them.
    """
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    lines = [
        line for line in lines if '"<eval_with_key>' not in line
    ]  # code that torch generates for loops and branches
    own = [line for line in lines if "/torch/" not in line] or lines
    if not own:
        return ""
    file, _, rest = own[-1].removeprefix('File "').partition('", line ')
    return f"{short_source_path(file)}:{rest}"


def control_flow_error(node: fx.Node, program: ExportedProgram) -> CaptureError:
    """Return the error for an operator whose operands are graphs, a loop or branch; it has no source line."""
    return CaptureError(
        path_of(node, program) or node.name,
        f"torch.ops.higher_order.{node.target}",
        "which operators it runs depends on data, but a captured graph always runs the same operators",
        remedy="compute both branches and select with torch.where, or write the loop with scan or while_loop; or "
        "quantize the modules in the body one by one",
    )


def number_of_data_error(node: fx.Node, program: ExportedProgram) -> CaptureError:
    """Return the error for an element of a tensor that a call reads as a Python number."""
    return CaptureError(
        path_of(node, program) or node.name,
        str(node.target),
        "it makes a Python number of an element of a tensor that a call computes or changes",
        remedy="compute with the element as a tensor, without item() or float()",
    )
