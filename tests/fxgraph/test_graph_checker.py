"""A pass that breaks a promise of its graph is named, with the node and what is wrong with it."""

import re

import pytest
import torch
from torch import fx, nn

from intaglio.fxgraph.graph_checker import BACKEND_GRAPH, finish_pass
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.graph_passes import copy_graph, run
from intaglio.fxgraph.node_info import set_info, tensor_type, update_info
from intaglio.ir import DType, TensorType, VerifyError
from intaglio.tracing import capture
from support.nets import Body

ATEN = torch.ops.aten


@pytest.fixture(scope="module")
def captured() -> fx.GraphModule:
    model = Body(lambda m, x: m.a(x).neg().relu(), a=nn.Linear(4, 3, bias=False))
    return capture(model, (torch.zeros(2, 4),)).module


def node(module: fx.GraphModule, name: str) -> fx.Node:
    return next(one for one in module.graph.nodes if one.name == name)


def no_output(module):
    module.graph.erase_node(node(module, "output"))


def output_in_front(module):
    with module.graph.inserting_before(node(module, "relu")):
        module.graph.output((node(module, "neg"),))


def a_reader_nobody_knows(module):
    del node(module, "neg").users[node(module, "relu")]


def a_user_that_reads_nothing(module):
    node(module, "linear").users[node(module, "relu")] = None


def read_before_made(module):
    node(module, "linear").append(node(module, "relu"))


def the_same_name(module):
    node(module, "relu").name = "neg"


def a_constant_that_is_not_there(module):
    delattr(module, node(module, "a_weight").target)


def a_constant_twice(module):
    weight, linear = node(module, "a_weight"), node(module, "linear")
    with module.graph.inserting_before(linear):
        again = module.graph.get_attr(weight.target)
    again.meta = dict(weight.meta)
    linear.args = (linear.args[0], again)
    linear.update_arg(0, weight)


def a_constant_of_another_shape(module):
    update_info(node(module, "a_weight"), type=TensorType((4, 3), DType.F32))


def a_constant_of_another_type(module):
    weight = node(module, "a_weight")
    weight.target = add_constant(module, "integers", torch.zeros(3, 4, dtype=torch.int8))


def no_type(module):
    update_info(node(module, "relu"), type=None)


def no_record(module):
    node(module, "relu").meta = {}


def no_origin(module):
    update_info(node(module, "relu"), origin=None)


def no_path(module):
    update_info(node(module, "a_weight"), path=None)


def another_example_value(module):
    node(module, "relu").meta["val"] = torch.zeros(2, 5)


BREAKS = {
    no_output: "the graph must have one output node",
    output_in_front: "the graph must have one output node",
    a_reader_nobody_knows: "%relu (aten.relu.default) reads %neg, but is not among its users",
    a_user_that_reads_nothing: "%linear (aten.linear.default) has the user %relu, which does not read it",
    read_before_made: "Argument 'neg' of Node 'relu' was used before it has been defined!",
    the_same_name: "Node redefined name neg!",
    a_constant_that_is_not_there: "Node a_weight target a_weight references nonexistent attribute a_weight",
    a_constant_twice: "reads the same constant as %a_weight",
    a_constant_of_another_shape: "%a_weight (get_attr) has shape [3, 4], but its record has [4, 3]",
    a_constant_of_another_type: "%a_weight (get_attr) is torch.int8, but its record has f32",
    no_type: "%relu (aten.relu.default) has no record of its type",
    no_record: "%relu (aten.relu.default) has no record of its type",
    no_origin: "%relu (aten.relu.default) has no record of its origin",
    no_path: "%a_weight (get_attr) has no record of its path",
    another_example_value: "%relu (aten.relu.default) has shape [2, 5], but its record has [n, 3]",
}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_pass_that_breaks_a_promise_is_named_with_the_node_and_the_promise(captured, broken):
    module = copy_graph(captured)
    with pytest.raises(VerifyError) as caught:
        run(module, (lambda graph: 0, broken))
    assert str(caught.value).startswith(f"after {broken.__name__}: ")
    assert BREAKS[broken] in str(caught.value)


def test_dead_code_and_constants_without_reader_are_removed(captured):
    def leave_dead_code(module):
        with module.graph.inserting_after(node(module, "a_weight")):
            copied = module.graph.call_function(ATEN.neg.default, (node(module, "a_weight"),))
        add_constant(module, "unread", torch.zeros(1))
        set_info(copied, type=tensor_type(node(module, "a_weight")))
        return 1

    module = copy_graph(captured)
    assert run(module, (leave_dead_code,)) == {"leave_dead_code": 1}
    assert not hasattr(module, "unread")
    assert [one.name for one in module.graph.nodes] == [one.name for one in captured.graph.nodes]


def test_graphs_for_other_engines_need_no_records_but_what_records_say_is_checked(captured):
    module = copy_graph(captured)
    no_record(module)
    finish_pass(module, "no_record", BACKEND_GRAPH)
    a_constant_of_another_shape(module)
    with pytest.raises(VerifyError, match=re.escape("after wrong_shape: %a_weight (get_attr) has shape [3, 4]")):
        finish_pass(module, "wrong_shape", BACKEND_GRAPH)
