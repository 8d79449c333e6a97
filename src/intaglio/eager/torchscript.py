"""Convert a reference model to a form that `torch.jit.script` accepts."""

from __future__ import annotations

from torch import fx

from intaglio.argument_checks import check_arguments_except
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.quant.qdq.convert import Reference
from intaglio.torch_private import OpOverload, pytree
from intaglio.tracing.captured import expect


@check_arguments_except("reference")
def scriptable(reference: Reference) -> fx.GraphModule:
    """Return the graph of a reference model with operators called by names that TorchScript resolves.

    The module takes the tensors of a call in order. It returns a single tensor if the model does, otherwise a tuple of
    all output tensors. Both `torch.jit.script` and `torch.jit.trace` accept it, and the results equal those of the
    reference.

    Args:
        reference: Reference model, for example from `rewrite`.
    """
    expect(reference, Reference, "scriptable")
    module = copy_graph(reference.module)
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload):
            node.target = node.target.overloadpacket
    if pytree.treespec_leaf() == reference.signature.out_tree:
        (output,) = [node for node in module.graph.nodes if node.op == "output"]
        output.args = (output.args[0][0],)
    module.recompile()
    return module
