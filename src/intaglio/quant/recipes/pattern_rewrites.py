"""Replacement of the matches of user patterns by what their `rewrite` callbacks build."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from intaglio.errors import IntaglioError, UnsupportedError
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import info, inherit_info, known_type, origin, size_in_example, tensor_type, update_info
from intaglio.fxgraph.nodes import call_of, constant_node, is_constant, overload_of, record_of, tensor_nodes
from intaglio.ir import DType, TensorType
from intaglio.ops import OpDef
from intaglio.quant.recipes.user_patterns import Found, QuantizerPattern, find, name_operators
from intaglio.signature import DTYPES
from intaglio.torch_private import pytree, schema_of


@dataclass(eq=False)
class ReplacementBuilder:
    """Builder of the operators that replace a match; a `rewrite` callback gets it as `post`."""

    _module: fx.GraphModule
    _found: Found
    _group: str
    _nodes: list[fx.Node] = field(default_factory=list)

    def call(self, overload: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of an ATen overload and return its node.

        Args:
            overload: name of the overload, such as ``aten.gelu.default``; it must return one tensor.
            args: nodes of the graph and numbers, as the overload takes them.
            kwargs: the same by name.

        Raises:
            UnsupportedError: the overload changes its operands, does not return one tensor, or has no shape rule for
                sizes that are not fixed; or an operand is computed after the match.
        """
        target, root = overload_of(overload), self._found.nodes[-1]
        if schema_of(target).is_mutable:
            raise self._error(f"{overload} changes its operands")
        if late := [value for value in tensor_nodes((args, kwargs)) if root < value]:
            raise self._error(f"{overload} reads {late[0].name}, which is computed after the match")
        with self._module.graph.inserting_before(root):
            node = self._module.graph.call_function(target, args, kwargs)
        inherit_info(node, root, rewritten_by=(self._found.pattern.name, self._group))
        update_info(node, type=self._type_of(node, overload))
        self._nodes.append(node)
        return node

    def constant(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Add a constant and return its node; `name` becomes a part of the constant's path in the model."""
        where = origin(self._found.nodes[-1]).path
        path = unused = f"{where}.{name}" if where else name
        known = {info(node).path for node in self._module.graph.nodes if is_constant(node)}
        count = 1
        while unused in known:
            count += 1
            unused = f"{path}_{count}"
        stored = add_constant(self._module, unused.replace(".", "_"), tensor.detach().clone().contiguous())
        return constant_node(self._module, stored, unused)

    def value(self, node: fx.Node) -> torch.Tensor:
        """Return the tensor of a constant.

        Raises:
            UnsupportedError: the node is computed while the model runs.
        """
        if not is_constant(node):
            raise self._error(f"{node.name} is computed while the model runs, and has no value yet")
        found: torch.Tensor = getattr(self._module, str(node.target)).detach()
        return found

    def _type_of(self, node: fx.Node, overload: str) -> TensorType:
        """Return the result's type: PyTorch computes it on the meta device, and shape rules the dynamic sizes."""
        args, kwargs = pytree.tree_map(_meta_or_self, (node.args, node.kwargs))
        result = node.target(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            raise self._error(f"{overload} does not return one tensor")
        shape = tuple(result.shape)
        if overload.startswith("quantized_decomposed."):  # its result has the shape of what it rounds
            return TensorType(known_type(node.args[0]).shape, DTYPES.get(result.dtype, DType.OTHER))
        kinds = [tensor_type(value) for value in tensor_nodes((node.args, node.kwargs))]
        if any(kind is None or not all(isinstance(size, int) for size in kind.shape) for kind in kinds):
            record = record_of(node)
            if record is None:
                raise self._error(f"{overload} has no shape rule for dynamic sizes")
            call = call_of(node, record)
            shapes = [each for each in call.shapes if each is not None]
            return TensorType(tuple(record.infer(record.bind(call), shapes)), DTYPES[result.dtype])
        return TensorType(shape, DTYPES.get(result.dtype, DType.OTHER))

    def _error(self, problem: str) -> UnsupportedError:
        return _error(self._found, problem)


def rewrite_matches(
    module: fx.GraphModule, patterns: Sequence[QuantizerPattern], operators: Iterable[OpDef] = ()
) -> int:
    """Replace the matches of all patterns that have a `rewrite` callback; return the number of replaced matches.

    Where matches overlap, the same rules decide as for quantization. The matches are found once, so that the result of
    a callback is not matched again.

    Args:
        module: the graph, which is rewritten in place.
        patterns: the user's patterns.
        operators: records of user-defined operators.

    Raises:
        UnsupportedError: a callback fails, or what it returns has another type than the match.
    """
    rewriting = [pattern for pattern in patterns if pattern.rewrite is not None]
    if not rewriting:
        return 0
    name_operators(module.graph, operators)
    computing = {node: None for node in module.graph.nodes if node.op == "call_function"}
    won, _ = find(module.graph, rewriting, computing)
    replaced: dict[fx.Node, fx.Node] = {}
    for found in won:
        # A callback of an earlier match may have replaced a value that this match reads.
        bound = {name: replaced.get(node, node) for name, node in found.bound.items()}
        _rewrite(module, Found(found.pattern, found.nodes, bound), replaced)
    return len(replaced)


def _rewrite(module: fx.GraphModule, found: Found, replaced: dict[fx.Node, fx.Node]) -> None:
    """Replace one match, unless its callback returns ``None``."""
    root = found.nodes[-1]
    post = ReplacementBuilder(module, found, root.name)
    assert found.pattern.rewrite is not None, f"{found.pattern.name} has no callback"
    try:
        result = found.pattern.rewrite(found.nodes, post, found.bound)
    except IntaglioError:
        raise
    except Exception as error:
        raise _error(found, f"its callback raised {type(error).__name__}: {error}") from error
    if result is None:
        for node in reversed(post._nodes):
            module.graph.erase_node(node)
        return
    if not isinstance(result, fx.Node) or result.graph is not module.graph:
        raise _error(found, f"its callback returned {type(result).__name__}, not a node of the graph or None")
    if result in found.nodes:
        raise _error(found, f"its callback returned {result.name}, a node of the match itself")
    if root < result:
        raise _error(found, f"its callback returned {result.name}, which is computed after the match")
    expected, given = known_type(root), tensor_type(result)
    if given is None or (given.shape, given.dtype) != (expected.shape, expected.dtype):
        raise _error(found, f"its callback returned {_type_text(given)}, but the match computes {_type_text(expected)}")
    root.replace_all_uses_with(result)
    replaced[root] = result
    for node in reversed(found.nodes):
        if not node.users:
            module.graph.erase_node(node)


def replacements(graph: fx.Graph, patterns: Sequence[QuantizerPattern]) -> list[Found]:
    """Return what callbacks have built as matches of their patterns, so that settings and callbacks apply to it."""
    by_name = {pattern.name: pattern for pattern in patterns}
    groups: dict[tuple[str, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if (group := info(node).rewritten_by) is not None and node.op == "call_function":
            groups.setdefault(group, []).append(node)
    view = FxGraphView(graph)
    return [
        # An `operator` of the pattern describes the matches that were kept.
        Found(replace(by_name[name], operator=None), tuple(sorted(nodes, key=view.position)), {})
        for (name, _), nodes in groups.items()
        if name in by_name
    ]


def _meta_or_self(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    kind = tensor_type(value)
    if kind is None:
        dim = info(value).dim
        return value if dim is None else size_in_example(dim, value)
    dtype = next(dtype for dtype, name in DTYPES.items() if name is kind.dtype)
    return torch.empty([size_in_example(size, value) for size in kind.shape], dtype=dtype, device="meta")


def _type_text(kind: TensorType | None) -> str:
    return "no tensor" if kind is None else f"{kind.dtype}[{', '.join(map(str, kind.shape))}]"


def _error(found: Found, problem: str) -> UnsupportedError:
    where = origin(found.nodes[-1])
    return UnsupportedError(where.path, where.operator, f"pattern {found.pattern.name!r}: {problem}")
