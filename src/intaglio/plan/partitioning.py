"""Integer graph -> partitions: an accumulator's producer and its reader are one kernel, and a table behind them; so are
a product that weighs the channels of an image and the convolution of single pixels that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from intaglio.ir import DType, Graph, Op
from intaglio.ops import op_def
from intaglio.ops.loop_ops.loop_space import body_of, space
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.ops.pointwise import MUL
from intaglio.plan.buffers import Buffer
from intaglio.plan.graph_passes.loop_merging import as_loop, is_plain
from intaglio.plan.plan_records import Partition, is_flat

WIDEST_HEAD_CHANNELS = 4096
"""Channels of what a head makes: the tallest tile of it fits ``WEIGHED_BYTES``, and its terms ``TERMS``, of
native/products/weighed_matmul.cpp."""


def fuse(graph: Graph) -> tuple[Partition, ...]:
    """Every operator in one partition, in execution order. A chain is as long as int32 accumulators link it, and ends
    with the table that alone reads its levels; it stands where its last operator stood, so that what its tail reads is
    made before."""
    users = graph.users()
    partitions: list[Partition] = []
    taken: set[tuple[str, ...]] = set()
    for op in graph.ops:
        if op.outputs in taken:
            continue
        chain = [op]
        while _accumulates(chain[-1], graph):
            (reader,) = users[chain[-1].output]
            chain.append(reader)
        if len(chain) > 1 and len(chain[-1].outputs) == 1 and chain[-1].output not in graph.outputs:
            readers = users[chain[-1].outputs[0]]
            chain += [op for op in readers if len(readers) == 1 and op_def(op).follows_product]
        taken.update(link.outputs for link in chain)
        partitions.append(Partition(_name(chain), tuple(chain)))
    position = {op.outputs: index for index, op in enumerate(graph.ops)}
    return tuple(sorted(partitions, key=lambda partition: position[partition.ops[-1].outputs]))


def join_heads(partitions: Sequence[Partition], graph: Graph, buffers: Mapping[str, Buffer]) -> list[Partition]:
    """Squeeze and excite: a convolution of single pixels takes the product in front as its head if nothing else reads
    it. It would be a pass over memory and a barrier of its own."""
    users = graph.users()
    products = {
        op.output: op
        for op in graph.ops
        if _weighs_channels(op, graph, buffers) and len(users[op.output]) == 1 and op.output not in graph.outputs
    }
    found: dict[tuple[str, ...], Partition] = {}
    for partition in partitions:
        head = products.get(partition.anchor.inputs[0]) if _takes_pixels(partition, graph, buffers) else None
        if head is not None:
            del found[head.outputs]
            partition = Partition(partition.name, (head, *partition.ops), headed=True)
        found[partition.ops[-1].outputs] = partition
    return list(found.values())


def join_epilogues(partitions: Sequence[Partition], graph: Graph) -> list[Partition]:
    """A loop over single elements, or a dequantize, that alone reads what a product makes runs in its kernel, while
    that lies in cache. Of several products that a loop reads, the last one takes it."""
    users, ends = graph.users(), {partition.output: partition for partition in partitions}
    found: dict[tuple[str, ...], Partition] = {}
    order = {partition.output: index for index, partition in enumerate(partitions)}
    for partition in partitions:
        loop = partition.anchor
        found[partition.ops[-1].outputs] = partition
        if not (loop.is_loop or op_def(loop).dequantizes) or not is_plain(loop, graph.types):
            continue
        products = [
            ends[name]
            for name in loop.inputs
            if name in ends and len(users[name]) == 1 and name not in graph.outputs and _gives_tiles(ends[name], graph)
        ]
        loop = as_loop(loop, graph.types)
        if products and _takes_tiles(loop, (product := max(products, key=lambda one: order[one.output])).output):
            del found[product.ops[-1].outputs]
            found[loop.outputs] = replace(product, ops=(*product.ops, loop))
    return list(found.values())


def _gives_tiles(partition: Partition, graph: Graph) -> bool:
    """Whether kernels make all results of it some pixels at a time. Depthwise ones, and phases of transposed
    convolutions, have an order of their own."""
    anchor = partition.anchor
    if len(partition.ops[-1].outputs) > 1 or not partition.tail or op_def(anchor).transposed:
        return False
    if op_def(anchor).multiplies_activations:
        return True
    groups = anchor.attrs.get("groups", 1)
    return op_def(anchor).multiplies_weight and (groups == 1 or graph.constants[anchor.inputs[1]].shape[0] != groups)


def _takes_tiles(loop: Op, value: str) -> bool:
    """Whether a loop computes element by element, all of its space from a value of that size."""
    body = body_of(loop)
    if not all(primitive(op).elementwise for op in body.ops):
        return False
    read = body.inputs[loop.inputs.index(value)]
    return all(body.types[name].shape == space(body) for name in (read, *body.outputs))


def _takes_pixels(partition: Partition, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Whether it is a convolution of one pixel after the other, all channels of each."""
    anchor = partition.anchor
    plain = op_def(anchor).convolves and len(graph.types[anchor.output].shape) == 4
    return plain and anchor.attrs["groups"] == 1 and is_flat(partition, graph, buffers)


def _weighs_channels(op: Op, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Whether it is the product of images, dense, and one pixel for each of them."""
    if op_def(op) is not MUL:
        return False
    shape, shapes = graph.types[op.output].shape, [graph.types[name].shape for name in op.inputs[:2]]
    if len(shape) != 4 or {*shapes} != {shape, (*shape[:2], 1, 1)}:
        return False
    image = buffers[op.inputs[shapes.index(shape)]]
    channels = image.channels()
    return (
        isinstance(channels, int)
        and channels <= WIDEST_HEAD_CHANNELS
        and not any(buffers[image.alias or image.value].halo)
    )


def _accumulates(op: Op, graph: Graph) -> bool:
    kind = graph.types[op.outputs[0]]
    return kind.dtype is DType.I32 and kind.q is not None


def _name(chain: list[Op]) -> str:
    """``layer1.0.conv1`` or, without a module of its own, the value it makes."""
    path = chain[0].origin.path
    return path if path and len(chain) > 1 else chain[-1].outputs[0]
