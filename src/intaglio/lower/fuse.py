"""Integer graph -> partitions: an accumulator's producer and its reader are one kernel, and a table behind them; so are
a product that weighs the channels of an image and the convolution of single pixels that reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intaglio.ir import Buffer, DType, Graph, Op, Partition, is_flat

WIDEST_HEAD = 4096
"""Channels of what a head makes: the tallest tile of it fits ``WEIGHED_BYTES``, and its terms ``TERMS``, of
native/program.h."""


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
            chain += [op for op in readers if len(readers) == 1 and op.kind == "table"]
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


def _takes_pixels(partition: Partition, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Whether it is a convolution of one pixel after the other, all channels of each."""
    anchor = partition.anchor
    return anchor.kind == "conv2d" and anchor.attrs["groups"] == 1 and is_flat(partition, graph, buffers)


def _weighs_channels(op: Op, graph: Graph, buffers: Mapping[str, Buffer]) -> bool:
    """Whether it is the product of images, dense, and one pixel for each of them."""
    if op.kind != "mul":
        return False
    shape, shapes = graph.types[op.output].shape, [graph.types[name].shape for name in op.inputs[:2]]
    if len(shape) != 4 or {*shapes} != {shape, (*shape[:2], 1, 1)}:
        return False
    image = buffers[op.inputs[shapes.index(shape)]]
    channels = image.channels()
    return isinstance(channels, int) and channels <= WIDEST_HEAD and not any(buffers[image.alias or image.value].halo)


def _accumulates(op: Op, graph: Graph) -> bool:
    kind = graph.types[op.outputs[0]]
    return kind.dtype is DType.I32 and kind.q is not None


def _name(chain: list[Op]) -> str:
    """``layer1.0.conv1`` or, without a module of its own, the value it makes."""
    path = chain[0].origin.path
    return path if path and len(chain) > 1 else chain[-1].outputs[0]
