"""Every private or unstable name of PyTorch that intaglio uses, with its purpose and what breaks without it.

Other modules import these names from here, so that a new release of PyTorch is checked in one file.
`tests/docs/test_torch_private.py` finds uses elsewhere; its list of exceptions says why each is not here.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "EnableTorchFunction",
    "FakeTensorMode",
    "FeatureDropout",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "buffers_of",
    "call_replace_hook",
    "current_function_mode",
    "decompose_used_composites",
    "forget_compiled_loops",
    "int8_matmul",
    "load_state_dict_pre_hooks",
    "make_wrapper_subclass",
    "parameters_of",
    "pytree",
    "quantized_decomposed",
    "schema_of",
    "size_expression",
    "size_hint",
    "state_dict_hooks",
    "storage_key",
    "submodules_of",
    "unset_fake_temporarily",
    "without_current_function_mode",
]

# Re-exported as they are:
# - pytree flattens the arguments and results of every call (24 modules). Without it: signatures, files and the eager
#   door need a flattening of their own; torch.export stores its tree specs, so files would need a new format.
# - OpOverload, OpOverloadPacket tell operators of a graph from Python functions. Without them: look at `type(...)`.
# - FakeTensorMode, unset_fake_temporarily run annotators and decompositions without data. Without them: quantizers of
#   the export flow see no `val`.
# - TorchDispatchMode records what training computes of constants. Without it: quantization-aware training.

DisableTorchFunction = torch._C.DisableTorchFunction
"""Context without ``__torch_function__``, modes included. Without it: the eager door would intercept its own work."""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Context without ``__torch_function__`` of subclasses. Without it: questions to deferred tensors would recurse."""
EnableTorchFunction = torch._C._EnableTorchFunction
"""Context that undoes `DisableTorchFunction`. Without it: modules that run while a call is intercepted."""
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a shape and element type without memory. Without it: deferred tensors of the eager door."""
FeatureDropout = nn.modules.dropout._DropoutNd
"""Base class of dropout modules, whose ``inplace`` does nothing in evaluation. Without it: list the classes."""


# ---- modes of the eager door ----------------------------------------------------------------------------------------


def current_function_mode() -> TorchFunctionMode | None:
    """Return the innermost function mode. Without it: calls nested in a call of an eager model."""
    found: TorchFunctionMode | None = _get_current_function_mode()
    return found


def without_current_function_mode() -> AbstractContextManager[Any]:
    """Suspend the innermost function mode inside the ``with``. Without it: as `current_function_mode`."""
    context: AbstractContextManager[Any] = _pop_mode_temporarily()
    return context


# ---- tensors and modules --------------------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one storage share. Without it: ``data_ptr``, which empty storages share."""
    return tensor.untyped_storage()._cdata


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers, to be changed in place. Without it: ``named_buffers`` and setattr."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of a module's own parameters. Without it: as `buffers_of`."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's own submodules. Without it: as `buffers_of`."""
    return module._modules


def state_dict_hooks(module: nn.Module) -> dict[Any, Any]:
    """Return the hooks that run when a state dictionary is made. Without it: copies of eager models keep the hooks of
    the original, as ``register_state_dict_post_hook`` gives no way to leave one out of a copy."""
    return module._state_dict_hooks


def load_state_dict_pre_hooks(module: nn.Module) -> dict[Any, Any]:
    """Return the hooks that run before a state dictionary is loaded. Without it: as `state_dict_hooks`."""
    return module._load_state_dict_pre_hooks


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the int32 product of two int8 matrices. Without it: second moments are counted in float64, slower."""
    return torch._int_mm(a, b)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator overload. Without it: arguments have no names and no defaults."""
    return operator._schema


def size_expression(size: torch.SymInt) -> Any:
    """Return the sympy expression of a symbolic size. Without it: no free dimensions."""
    return size.node.expr


def size_hint(size: torch.SymInt) -> Any:
    """Return the number that a symbolic size had in the example. Without it: as `size_expression`."""
    return size.node.hint


@contextmanager
def call_replace_hook(module: fx.GraphModule, hook: Callable[[fx.Node, str, fx.Node], None]) -> Iterator[None]:
    """Call the hook whenever a node takes the place of another one. Without it: training loses which values had a
    batch norm or dropout when passes replace their nodes."""
    with module._set_replace_hook(hook):
        yield


def quantized_decomposed() -> Any:
    """Return torch's namespace of quantize and dequantize operators, registered by a deprecated module. Without it:
    reference models need operators of their own. The import waits until it is needed."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401

    return torch.ops.quantized_decomposed


# ---- export ---------------------------------------------------------------------------------------------------------


def forget_compiled_loops() -> None:
    """Drop what torch compiled of its loops. It compiles each, in an export too, and would take what it has of an
    earlier one for this one, and its sizes for those that are free here. Without it: a second capture of a loop has
    the sizes of the first."""
    from torch._dynamo.eval_frame import remove_from_cache

    for name in ("scan", "map", "while_loop"):
        module = importlib.import_module(f"torch._higher_order_ops.{name}")
        for function in [value for value in vars(module).values() if isinstance(value, types.FunctionType)]:
            for code in function.__code__.co_consts:  # what it hands to torch.compile is defined inside
                if isinstance(code, types.CodeType):
                    remove_from_cache(code)


def decompose_used_composites(program: ExportedProgram) -> ExportedProgram:
    """Return ``program.run_decompositions({})``, which traces the program again, in less time.

    A program whose operators all stay as they are is not traced again. For others, torch would set up each of its 600
    composite operators, which takes two thirds of the call; here only those of the graph are. Without these names (a
    torch whose steps are others): the public call, with the same result.
    """
    try:
        from torch._export.utils import _is_cia_op as is_composite
        from torch._export.utils import _is_preservable_cia_op as is_preserved
        from torch.export.exported_program import _decompose_exported_program as decompose
        from torch.export.exported_program import _special_op_to_preserve_cia as preserve  # type: ignore[attr-defined]

        graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
        used = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
        operators = [target for target in used if isinstance(target, OpOverload)]
        preserved = {operator for operator in operators if is_preserved(operator)}
        split = any(is_composite(operator) and operator not in preserved for operator in operators)
        if len(graphs) == 1 and not split and all(map(_is_left_alone, used - preserved)):
            program.graph_module.graph.eliminate_dead_code()
            return program
        composite: dict[Any, Any] = dict.fromkeys(preserved, preserve)
        with unset_fake_temporarily():
            return decompose(
                program,
                cia_to_decomp=composite,
                python_decomp_table={},
                joint_loss_index=None,
                decompose_custom_triton_ops=False,
            )
    except (ImportError, TypeError):
        return program.run_decompositions({})


def _is_left_alone(target: Any) -> bool:
    """Return whether decomposition without a table keeps an operator that is no composite: a function of its operands
    that returns something new or a view of them. Sizes are computed by Python's own functions."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") == "_operator"
    unsafe = torch.Tag.maybe_aliasing_or_mutating in target.tags or "lift" in target.name()
    return not (unsafe or target._schema.is_mutable) and bool(target._schema.returns)
