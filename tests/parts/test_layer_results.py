"""Models of ``transformers`` that read the results of layers inside of their submodules."""

import pytest
import torch

import intaglio
from support.lowering import sqnr
from support.transformers_library import library

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}


def pixtral():
    torch.manual_seed(0)
    model = library().PixtralVisionModel(library().PixtralVisionConfig(**SIZES, image_size=32, patch_size=16))
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.dim() > 1 else 1)
    return model.eval()


class Reader(torch.nn.Module):
    """A model that reads the result of a layer, with sizes that are no part of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = pixtral(), torch.nn.Linear(32, 8)

    def forward(self, pixels, sizes):
        found = self.tower(pixels, image_sizes=sizes.tolist(), output_hidden_states=True)
        return self.head(found.hidden_states[-2])


def test_layers_whose_results_are_read_are_parts_of_their_own():
    tower = pixtral()
    from intaglio.integrations.transformers.layer_results import has_collected_layers

    assert not has_collected_layers(tower.transformer), "the first call that asks for results installs the hooks"
    with torch.no_grad():
        tower(torch.randn(1, 3, 32, 32), output_hidden_states=True)
    assert has_collected_layers(tower.transformer)
    assert has_collected_layers(tower.transformer.layers)
    assert not has_collected_layers(tower), "it collects the results itself"
    assert not has_collected_layers(tower.transformer.layers[0]), "attention scores are not read"


@pytest.mark.slow(reason="quantizes the parts of a model")
def test_results_of_layers_are_read_from_parts_and_from_files(tmp_path):
    model = Reader().eval()
    draw = torch.Generator().manual_seed(0)
    sizes = [torch.tensor([[32, 32], [16, 32]]), torch.tensor([[32, 16], [16, 16]])]
    data = [(torch.randn(2, 3, 32, 32, generator=draw), one) for one in sizes]
    int8 = intaglio.quantize(model, data, progress=False)
    assert {f"tower.transformer.layers.{index}" for index in range(3)} < set(int8.parts)
    with torch.no_grad():
        expected, found = model(*data[0]), int8(*data[0])
        assert sqnr(found, expected) > 25
        int8.save(tmp_path / "model")
        loaded = intaglio.load_into(tmp_path / "model", Reader())
        assert torch.equal(loaded(*data[0]), found)
