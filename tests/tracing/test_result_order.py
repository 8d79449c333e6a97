"""Results whose fields come in another order when the model is traced, or when the result is rebuilt."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

import intaglio
from intaglio.errors import CaptureError
from intaglio.torch_private import pytree
from intaglio.tracing import capture
from intaglio.tracing.result_order import leaf_order, with_fields_ordered


class Reordered(nn.Module):
    """Returns fields in another order while it is traced, next to a size and a tensor."""

    def __init__(self, result_class: type, traced: tuple[str, ...] = ("last_hidden_state", "pooler_output")) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.result_class, self.traced = result_class, traced

    def forward(self, x: torch.Tensor):
        hidden = self.first(x)
        found = {"pooler_output": (self.second(hidden), x.shape[0]), "last_hidden_state": hidden.relu()}
        names = self.traced if torch.compiler.is_exporting() else tuple(found)
        result = self.result_class()
        for name in names:
            result[name] = found.get(name)
        return {"nested": [result], "last": hidden}


@pytest.mark.parametrize("result_class", [dict, OrderedDict])
def test_fields_have_the_order_of_the_model(result_class):
    model, x = Reordered(result_class).eval(), torch.randn(3, 4)
    captured = capture(model, x)
    for batch in (x, torch.randn(5, 4)):
        expected, got = model(batch), captured(batch)
        assert pytree.tree_structure(got) == pytree.tree_structure(expected)
        torch.testing.assert_close(pytree.tree_leaves(got), pytree.tree_leaves(expected))


class Norm(nn.Module):
    """Assigns fields in another order than that of their class; torch.export decomposes its operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> dict[str, BaseModelOutputWithPooling]:
        hidden = self.linear(x)
        result = BaseModelOutputWithPooling(last_hidden_state=hidden)
        result["hidden_states"] = (None, hidden.relu())
        result["pooler_output"] = self.norm(hidden)
        return {"nested": result}


@pytest.mark.parametrize("train", [False, True])
def test_a_class_that_orders_its_fields_itself_keeps_each_value_under_its_name(train):
    model, x = Norm().train(train), torch.randn(3, 4)
    got, expected = capture(model, x, train=train)(x)["nested"], model(x)["nested"]
    assert list(expected) == ["last_hidden_state", "hidden_states", "pooler_output"]
    assert isinstance(got, BaseModelOutputWithPooling)
    assert got.hidden_states[0] is None
    torch.testing.assert_close(got.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(got.hidden_states[1], expected.hidden_states[1])
    torch.testing.assert_close(got.pooler_output, expected.pooler_output)


def test_a_quantized_and_a_saved_model_have_the_order_too(tmp_path):
    model, x = Reordered(dict).eval(), torch.randn(8, 4)
    quantized = intaglio.quantize(model, [x], progress=False)
    quantized.save(tmp_path / "model.intaglio")
    for one in (quantized, intaglio.load(tmp_path / "model.intaglio")):
        (fields,) = one(x)["nested"]
        assert list(fields) == ["pooler_output", "last_hidden_state"]
        assert fields["pooler_output"][0].shape == (8, 2)
        assert fields["pooler_output"][1] == 8
        assert fields["last_hidden_state"].shape == (8, 4)


def test_fields_that_the_graph_lacks_do_not_keep_others_from_their_order():
    model, x = Reordered(dict).eval(), torch.randn(3, 4)
    wanted = {"cache": 0, "nested": [{"last_hidden_state": 0, "cache": 0, "pooler_output": (0, 0)}], "last": 0}
    ordered = with_fields_ordered(capture(model, x), pytree.tree_structure(wanted))
    got, expected = ordered(x), model(x)
    assert list(got["nested"][0]) == ["last_hidden_state", "pooler_output"]
    torch.testing.assert_close(got["nested"][0], dict(sorted(expected["nested"][0].items())))
    torch.testing.assert_close(got["last"], expected["last"])


def test_a_result_with_other_fields_is_refused():
    model = Reordered(dict, traced=("last_hidden_state", "other_output")).eval()
    with pytest.raises(CaptureError, match="another structure"):
        capture(model, torch.randn(3, 4))


@pytest.mark.parametrize(
    ("got", "expected", "order"),
    [
        ({"a": 1, "b": (2, 3)}, {"b": (2, 3), "a": 1}, [1, 2, 0]),
        ([{"a": 1, "b": 2}, 3], [{"b": 2, "a": 1}, 3], [1, 0, 2]),
        ((1, 2), (1, 2), [0, 1]),
        ((1, 2), [1, 2], None),
        ({"a": 1}, {"b": 1}, None),
        ({"a": 1}, {"a": 1, "b": 2}, None),
        ({"a": (1, 2)}, {"a": [1, 2]}, None),
        (OrderedDict(a=1), {"a": 1}, None),
    ],
)
def test_order_of_leaves(got, expected, order):
    assert leaf_order(pytree.tree_structure(got), pytree.tree_structure(expected)) == order
