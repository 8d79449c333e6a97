"""A reference model in the form that `torch.jit.script` takes."""

from __future__ import annotations

from torch import fx

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.quant.qdq.convert import Reference
from intaglio.torch_private import OpOverload, pytree


def scriptable(reference: Reference) -> fx.GraphModule:
    """The graph, with operators called by the names that TorchScript resolves; tensors in, tensors out.

    It takes the tensors of a call in order. It gives the one tensor that the model gives, else a tuple of all of them.
    ``torch.jit.script`` and ``torch.jit.trace`` both take it, and all three compute what the reference does.
    """
    module = copy_graph(reference.module)
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            node.target = node.target.overloadpacket
    if pytree.treespec_leaf() == reference.signature.out_tree:
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        output.args = (output.args[0][0],)
    module.recompile()
    return module
