"""`Entry`: a model and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import Dim

Call = tuple[Any, ...] | Mapping[str, Any]


@dataclass
class Entry:
    """A model and its inputs.

    Attributes:
        model: the model, in evaluation mode.
        batch: function that returns the arguments of a call, a tuple or a dictionary, for a number of samples.
        sizes: calls of other sizes than those of ``batch``, by name.
        recipe: recipe for `intaglio.quantize`; ``None`` leaves the choice to it.
        most_used: whether the model is one of the most used ones.
        dynamic_shapes: free axes, as `intaglio.quantize` takes them; by default the batch, and the length of token ids.
    """

    model: nn.Module
    batch: Callable[[int], Call]
    sizes: Mapping[str, Call] = field(default_factory=dict)
    recipe: str | None = None
    most_used: bool = False
    dynamic_shapes: Any = None


def image_entry(model: nn.Module, size: int, *, free: bool = False, most_used: bool = False) -> Entry:
    """Return the entry of a model that takes images f32[n, 3, size, size].

    Args:
        model: the model.
        size: height and width.
        free: whether the model takes images of other sizes.
        most_used: whether the model is one of the most used ones.
    """
    draw_statistics(model)
    settle_statistics(model, torch.randn(4, 3, size, size))
    other = {f"{size + 32} pixels": (torch.randn(2, 3, size + 32, size + 32),)} if free else {}
    shapes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},) if free else None

    def batch(count: int) -> Call:
        return (torch.randn(count, 3, size, size),)

    return Entry(model.eval(), batch, other, most_used=most_used, dynamic_shapes=shapes)


def random_transformer(kind: str, **options: Any) -> nn.Module:
    """Return a model of transformers with random weights, which are the same in every call, in evaluation mode.

    Args:
        kind: name of its class.
        options: options of its configuration.
    """
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**options)).eval()


def draw_statistics(model: nn.Module) -> None:
    """Draw statistics of batch norms, weights of layers that begin with zeros, and biases, as trained models have.

    transformers draws the weights of some batch norms with a standard deviation of 0.02, so that nothing is left of an
    image behind a few layers. They are drawn around 1, too.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine and 0 < module.weight.abs().max() < 0.2:
            nn.init.uniform_(module.weight, 0.5, 1.5)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and module.track_running_stats:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.6, 1.4)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)


@torch.no_grad()
def settle_statistics(model: nn.Module, *arguments: torch.Tensor, **named: torch.Tensor) -> None:
    """Give batch norms the statistics of a call, as in a trained model.

    With others, most networks have almost the same result for all images, and ratios of signal to noise say nothing.
    """
    model.eval()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        return
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
        if norm.weight is not None and not norm.weight.any():
            nn.init.constant_(norm.weight, 0.5)  # the end of a residual branch, which begins with zeros
    model(*arguments, **named)
    for norm, momentum in zip(norms, kept, strict=True):
        norm.eval()
        norm.momentum = momentum


def token_batch(words: int, length: int, *, padded: bool = True) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return a function that makes batches of tokens, with a mask that hides the end of every second text."""

    def make(count: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(count, length, dtype=torch.long)
        if padded:
            mask[1::2, length * 3 // 4 :] = 0
        return {"input_ids": torch.randint(5, words, (count, length)), "attention_mask": mask}

    return make
