"""All private or unstable names of PyTorch that intaglio uses, each with its purpose and what would break without it.

Other modules import these names from here, so that a new release of PyTorch needs one file to be checked.
`tests/docs/test_torch_private.py` finds uses elsewhere; its list of exceptions gives the reason for each.
"""

from __future__ import annotations

import importlib
import operator
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec

import torch
from torch import fx, nn
from torch._decomp import decomposition_table
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Parameters = ParamSpec("Parameters")

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
    "call_hooks",
    "call_replace_hook",
    "called_while_traced",
    "current_function_mode",
    "decompose_used_composites",
    "decomposition_of",
    "default_store",
    "foreach_copy",
    "forget_compiled_loops",
    "global_hooks_for",
    "grouped_mm",
    "int8_matmul",
    "is_composite",
    "is_in_jit_trace",
    "is_traced",
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
    "traced_conditions",
    "uncompared_masks",
    "unset_fake_temporarily",
    "version_of",
    "without_current_function_mode",
    "without_global_hooks",
]

# Re-exported unchanged:
# - pytree flattens the arguments and results of every call (24 modules). Without it, signatures, files and eager mode
#   would need a flattening of their own; torch.export stores its tree specs, so files would need a new format.
# - OpOverload and OpOverloadPacket distinguish operators of a graph from Python functions. Without them, compare
#   `type(...)`.
# - FakeTensorMode and unset_fake_temporarily run annotators and decompositions without data. Without them, quantizers
#   of the export flow see no `val`.
# - TorchDispatchMode records operations on constants during training. Without it, training does not work.

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Returns how many in-place updates of a tensor PyTorch has counted. Without it, compare contents."""
DisableTorchFunction = torch._C.DisableTorchFunction
"""Context without ``__torch_function__``, modes included. Without it, eager mode would intercept its own operations."""
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Context without ``__torch_function__`` of subclasses. Without it, attributes of deferred tensors would recurse."""
EnableTorchFunction = torch._C._EnableTorchFunction
"""Context that reverts `DisableTorchFunction`. Without it, modules could not run while a call is intercepted."""
foreach_copy = torch._foreach_copy_
"""Copies lists of tensors. Without it, a step of a decoder copies keys and values layer by layer."""
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Creates a tensor with a shape and an element type but no memory. Without it, eager mode has no deferred tensors."""
grouped_mm = getattr(torch, "_grouped_mm", None)
"""Product of groups of rows, which torch.nn.functional.grouped_mm calls; ``None`` before PyTorch 2.8. Without it,
mixtures of experts that call it in float32 cannot be captured."""
FeatureDropout = nn.modules.dropout._DropoutNd
"""Base class of dropout modules, whose ``inplace`` has no effect in evaluation. Without it, they must be listed."""


# ---- function modes of eager mode ------------------------------------------------------------------------------------


def current_function_mode() -> TorchFunctionMode | None:
    """Return the innermost function mode. Without it, calls nested in a call of an eager model are not recognized."""
    found: TorchFunctionMode | None = _get_current_function_mode()
    return found


def without_current_function_mode() -> AbstractContextManager[Any]:
    """Suspend the innermost function mode inside the ``with``. Needed for the reason of `current_function_mode`."""
    context: AbstractContextManager[Any] = _pop_mode_temporarily()
    return context


def is_in_jit_trace() -> bool:
    """Return whether `torch.jit.trace` records operators. Without it, see `is_traced`."""
    return torch._C._get_tracing_state() is not None


def is_traced() -> bool:
    """Return whether operators are recorded in a graph (`make_fx`, `torch.jit.trace`) or return tensors without data
    (`FakeTensorMode`). Without it, such calls of a quantized model would return memory that nothing has written."""
    if is_in_jit_trace():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE))


def called_while_traced(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Let Dynamo call a function instead of tracing it. Without it, errors that are raised for ``torch.export(...,
    strict=True)`` end in one of Dynamo, which cannot construct them."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return function


# ---- tensors and modules --------------------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors of one storage share; sparse tensors have no storage and share it with no other.
    Without it, only ``data_ptr`` remains, which is 0 for all empty storages."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return -id(tensor)
    return tensor.untyped_storage()._cdata


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dictionary of a module's own buffers, which may be changed in place. Without it, use ``named_buffers``
    and ``setattr``."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary of a module's own parameters. Without it, use ``named_parameters`` and ``setattr``."""
    return module._parameters


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary of a module's own submodules. Without it, use ``named_children`` and ``setattr``."""
    return module._modules


def call_hooks(module: nn.Module) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return the dictionaries of the hooks that run before and after a module's forward. Without them, a copy of a
    model cannot be made without its hooks, which only the handles that their owners hold can remove."""
    return module._forward_pre_hooks, module._forward_hooks


class _ModuleConditions(threading.local):
    """The conditions that modules must meet in the current thread for hooks of all modules to run."""

    all: tuple[Callable[[nn.Module], bool], ...] = ()


_conditions = _ModuleConditions()


class _ConditionalHook:
    """A hook of all modules that runs for modules which meet the conditions of the current thread."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        met = all(condition(module) for condition in _conditions.all)
        return self.hook(module, *arguments) if met else None


@contextmanager
def global_hooks_for(condition: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Run hooks of all modules (`register_module_forward_hook`) inside the ``with`` for modules with a condition only.
    Without it, such hooks change the values of graphs and observers, which are modules that the user does not have.

    Hooks that exist are wrapped once and stay so: other threads may be calling them.
    """
    for hooks in (nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks):
        for key, hook in list(hooks.items()):
            if not isinstance(hook, _ConditionalHook):
                hooks[key] = _ConditionalHook(hook)
    outer, _conditions.all = _conditions.all, (*_conditions.all, condition)
    try:
        yield
    finally:
        _conditions.all = outer


def without_global_hooks() -> AbstractContextManager[None]:
    """Run no hooks of all modules inside the ``with``. Needed for the same reason as `global_hooks_for`."""
    return global_hooks_for(lambda module: False)


def state_dict_hooks(module: nn.Module) -> dict[Any, Any]:
    """Return the hooks that run when a state dictionary is made. Without it, copies of eager models keep the hooks of
    the original, because ``register_state_dict_post_hook`` offers no way to leave one out of a copy."""
    return module._state_dict_hooks


def load_state_dict_pre_hooks(module: nn.Module) -> dict[Any, Any]:
    """Return the hooks that run before a state dictionary is loaded. Needed for the reason of `state_dict_hooks`."""
    return module._load_state_dict_pre_hooks


def int8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the int32 product of int8 matrices. Without it, second moments are computed in float64, more slowly."""
    return torch._int_mm(a, b)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def schema_of(operator: Any) -> Any:
    """Return the schema of an operator overload. Without it, names and defaults of arguments are unknown."""
    return operator._schema


def size_expression(size: torch.SymInt) -> Any:
    """Return the sympy expression of a symbolic size. Without it, all dimensions would be static."""
    return size.node.expr


def size_hint(size: torch.SymInt) -> Any:
    """Return the number that a symbolic size had in the example. Without it, all dimensions would be static."""
    return size.node.hint


def traced_conditions(size: torch.SymInt) -> list[tuple[Any, Any]]:
    """Return the conditions on sizes that held while the model was traced, as sympy expressions, each with the frame of
    the code that tested it. Without it, calls with other sizes would take the branches of the example."""
    env = size.node.shape_env
    return [(env.replace(one.expr), one.sloc.framework_loc) for one in env.guards]


def forget_new_symbols(number: torch.SymFloat) -> None:
    """Forget symbols for numbers that were read from tensors and that no operator has returned. torch.export leaves
    them behind for numbers that it reads twice, and its decompositions then refuse the graph."""
    if (pending := getattr(number.node.shape_env, "pending_fresh_unbacked_symbols", None)) is not None:
        pending.clear()


@contextmanager
def call_replace_hook(module: fx.GraphModule, hook: Callable[[fx.Node, str, fx.Node], None]) -> Iterator[None]:
    """Call ``hook`` whenever a node replaces another one, so that training knows which had a batch norm or dropout."""
    with module._set_replace_hook(hook):
        yield


@contextmanager
def uncompared_masks() -> Iterator[None]:
    """Let encoders and decoders of PyTorch take masks as they are, unless ``is_causal`` is given. Without it, they
    compare the values of a mask with those of a causal one, which only chooses a kernel and cannot be exported."""
    from torch.nn.modules import transformer

    compare = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = compare


def quantized_decomposed() -> Any:
    """Return PyTorch's namespace of quantize and dequantize operators, which a deprecated module registers. Without it,
    reference models need operators of their own. The module is imported at the first call."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed


def default_store() -> Any:
    """Return the store of the default process group, through which its processes met. Without it, an error of an
    exchange does not name the process that ended."""
    return torch.distributed.distributed_c10d._get_default_store()


# ---- export ---------------------------------------------------------------------------------------------------------


def forget_compiled_loops() -> None:
    """Drop the code that PyTorch compiled for its loop operators.

    PyTorch compiles each loop, during an export too. It would reuse the code of an earlier loop for a new one. Without
    it, a second capture of a loop has the sizes of the first.
    """
    from torch._dynamo.eval_frame import remove_from_cache

    for name in ("scan", "map", "while_loop"):
        module = importlib.import_module(f"torch._higher_order_ops.{name}")
        for function in [value for value in vars(module).values() if isinstance(value, types.FunctionType)]:
            for code in function.__code__.co_consts:  # the function that it passes to torch.compile is nested
                if isinstance(code, types.CodeType):
                    remove_from_cache(code)


PRODUCTS, DIFFERENCE = ("einsum", "tensordot", "linalg_multi_dot", "chain_matmul"), torch.ops.aten.diff.default
COMPOSITE_NAMES = (*PRODUCTS, "cosine_similarity", "pairwise_distance", "diff")
DECOMPOSED_COMPOSITES = {getattr(torch.ops.aten, name).default for name in COMPOSITE_NAMES}
"""Operators that PyTorch would preserve, and that are decomposed into operators which layers or loops compute."""


def decompose_used_composites(program: ExportedProgram) -> ExportedProgram:
    """Return ``program.run_decompositions({})``, which traces the program again, in less time.

    A program whose operators all stay unchanged is not traced again. For others only the operators of the graph are set
    up; PyTorch would set up its 600 composite operators, which takes two thirds of the call. If PyTorch lacks these
    names, the public function gives the same result. Meanwhile the result is a tuple of leaves, because classes of
    Transformers would put their fields in an order of their own.
    """
    result = program.module_call_graph[0].signature
    if result is None:
        return _decompose(program)
    structure = result.out_spec
    result.out_spec = pytree.tree_structure((0,) * structure.num_leaves)
    try:
        decomposed = _decompose(program)
    finally:
        result.out_spec = structure
    if (result := decomposed.module_call_graph[0].signature) is not None:
        result.out_spec = structure
    return decomposed


def _decompose(program: ExportedProgram) -> ExportedProgram:
    try:
        from torch._export.utils import _is_cia_op as is_composite
        from torch._export.utils import _is_preservable_cia_op as is_preserved
        from torch.export.exported_program import _decompose_exported_program as decompose
        from torch.export.exported_program import _special_op_to_preserve_cia as preserve  # type: ignore[attr-defined]  # not in __all__

        graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
        used = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
        operators = [target for target in used if isinstance(target, OpOverload)]
        values = [node.meta["val"] for graph in graphs for node in graph.nodes if node.target is DIFFERENCE]
        whole = {DIFFERENCE for value in values if not value.is_floating_point()}  # passes know those of ranges
        preserved = {one for one in operators if is_preserved(one) and one not in DECOMPOSED_COMPOSITES - whole}
        kept = preserved | {torch.ops.aten.reshape.default}  # decomposition makes it a view of its operand or of a copy
        split = any(map(is_composite, {*operators} - kept))
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


def is_composite(target: OpOverload) -> bool:
    """Return whether PyTorch implements an operator by calls of others. Without it, aliases keep their own names."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def decomposition_of(target: OpOverload) -> Callable[..., Any] | None:
    """Return a function that computes an operator by other operators, from PyTorch itself. Without it, operators that
    PyTorch implements as another one (`torch.multiply`) stay in float."""
    if is_composite(target):
        return target.decompose
    found: Callable[..., Any] | None = decomposition_table.get(target)
    return found


def _is_left_alone(target: Any) -> bool:
    """Return whether decomposition without a table keeps an operator that is not composite: a functional operator or a
    view of its operands. Sizes are computed by functions of the module ``operator``."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") == "_operator"
    unsafe = torch.Tag.maybe_aliasing_or_mutating in target.tags or "lift" in target.name()
    return not (unsafe or target._schema.is_mutable) and bool(target._schema.returns)


def assume(condition: Any) -> None:
    """Tell torch.export that a condition on sizes always holds. Raise `RuntimeError` if it does not."""
    torch._check(condition)
