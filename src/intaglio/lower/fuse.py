"""Integer graph -> partitions: an accumulator's producer and its reader are one kernel, and a table behind them."""

from __future__ import annotations

from intaglio.ir import DType, Graph, Op, Partition


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


def _accumulates(op: Op, graph: Graph) -> bool:
    kind = graph.types[op.outputs[0]]
    return kind.dtype is DType.I32 and kind.q is not None


def _name(chain: list[Op]) -> str:
    """``layer1.0.conv1`` or, without a module of its own, the value it makes."""
    path = chain[0].origin.path
    return path if path and len(chain) > 1 else chain[-1].outputs[0]
