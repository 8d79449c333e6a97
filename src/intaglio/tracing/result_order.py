"""Order of the fields of a result.

It may be another one when torch.export traces a model. Results of Transformers have the order of their class when they
are made from their fields, but that in which the model assigned them in its own result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, pairwise

from intaglio.torch_private import pytree
from intaglio.tracing.captured import Captured


def leaf_order(got: pytree.TreeSpec, expected: pytree.TreeSpec) -> list[int] | None:
    """Return the number in `got` of each leaf of `expected`.

    Args:
        got: structure of a result.
        expected: structure with the same fields, in the same or another order.

    Returns:
        The numbers, or ``None`` if the structures differ in more than the order of fields.
    """
    if got == expected:
        return list(range(got.num_leaves))
    if got.type is not expected.type or got.num_children != expected.num_children:
        return None
    children = list(range(got.num_children))
    if isinstance(got.type, type) and issubclass(got.type, Mapping) and isinstance(got.context, list):
        if set(got.context) != set(expected.context):
            return None
        children = [got.context.index(name) for name in expected.context]
    elif got.context != expected.context:
        return None
    spans = [range(*span) for span in pairwise(accumulate((one.num_leaves for one in got.children()), initial=0))]
    order: list[int] = []
    for number, child in zip(children, expected.children(), strict=True):
        inside = leaf_order(got.child(number), child)
        if inside is None:
            return None
        order += [spans[number][leaf] for leaf in inside]
    return order


def with_fields_ordered(captured: Captured, expected: pytree.TreeSpec) -> Captured:
    """Return the graph with the fields of its result in the order in which the float model returns them.

    Args:
        captured: the graph, whose output node is changed.
        expected: structure of the float model's result. Where it differs in more than the order, nothing changes.
    """
    signature = captured.signature
    order, tree = _in_order_of(signature.out_tree, expected)
    if signature.out_tree == tree:
        return captured
    output = captured.module.graph.output_node()
    tensors = [leaf for leaf, entry in enumerate(signature.outputs) if entry.value is not None]
    values = dict(zip(tensors, output.args[0], strict=False))  # written inputs and state follow the results
    output.args = ((*(values[leaf] for leaf in order if leaf in values), *output.args[0][len(tensors) :]),)
    captured.module.recompile()
    outputs = tuple(signature.outputs[leaf] for leaf in order)
    return replace(captured, signature=replace(signature, outputs=outputs, out_tree=tree))


def _in_order_of(got: pytree.TreeSpec, expected: pytree.TreeSpec) -> tuple[list[int], pytree.TreeSpec]:
    """Return a structure with its fields in the order of another one, and the number of each of its leaves in `got`.

    Fields that only one of them has, such as caches, stay behind the others.
    """
    if got.type is not expected.type or got == expected or got.is_leaf():
        return list(range(got.num_leaves)), got
    names, context = list(range(got.num_children)), got.context
    own, other = list(names), list(range(expected.num_children))
    if isinstance(got.type, type) and issubclass(got.type, Mapping) and isinstance(got.context, list):
        own, other = list(got.context), list(expected.context)
        names = context = [name for name in other if name in own] + [name for name in own if name not in other]
    spans = [range(*span) for span in pairwise(accumulate((one.num_leaves for one in got.children()), initial=0))]
    order, children = list[int](), list[pytree.TreeSpec]()
    for name in names:
        child, leaves = got.child(own.index(name)), spans[own.index(name)]
        inside = list(range(child.num_leaves))
        if name in other:
            inside, child = _in_order_of(child, expected.child(other.index(name)))
        order += [leaves[leaf] for leaf in inside]
        children.append(child)
    return order, pytree.TreeSpec(got.type, context, children)
