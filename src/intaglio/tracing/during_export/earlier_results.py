"""Models that hold results of earlier calls: activations in attributes, and what depends on the size of the inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from intaglio.signature import clone_tensors
from intaglio.torch_private import buffers_of, pytree


@contextlib.contextmanager
def without_size_caches(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let forward compute again what it keeps for inputs of the size of the example.

    Code such as ``if self.shape != x.shape: self.shape, self.anchors = x.shape, anchors(x)`` would make the kept values
    and this size constants of the graph. The model runs with one more sample first, so that the values are those of
    another size. Attributes that are set inside of the context are restored.

    Args:
        model: a copy of the float model.
        args: positional arguments of the example.
        kwargs: keyword arguments of the example.
    """
    if not _keeps_sizes(model):
        yield
        return
    before = _Attributes(model)
    if not model.training:
        _run_with_another_sample(model, args, kwargs)
    stale, forward = _Attributes(model), model.forward

    @functools.wraps(forward)
    def forward_of_another_size(*given: Any, **named: Any) -> Any:
        stale.restore()  # torch.export calls forward several times
        return forward(*given, **named)

    model.forward = forward_of_another_size
    try:
        yield
    finally:
        before.restore()


class _Attributes:
    """The plain attributes of all modules of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [(module, plain_attributes(module)) for module in model.modules()]

    def restore(self) -> None:
        """Give all modules these attributes and no others."""
        for module, kept in self.kept:
            for name in plain_attributes(module).keys() - kept.keys():
                delattr(module, name)
            vars(module).update(kept)


def _keeps_sizes(model: nn.Module) -> bool:
    """Return whether a plain attribute of a module is a tensor or a shape."""
    kept = (torch.Size, torch.Tensor)
    return any(isinstance(value, kept) for module in model.modules() for value in plain_attributes(module).values())


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that `nn.Module` does not manage."""
    return {name: value for name, value in vars(module).items() if name not in MANAGED}


MANAGED = frozenset(vars(nn.Module()))


def _run_with_another_sample(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Run the model with one more sample than the example, if it takes that, and restore its buffers."""

    def longer(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or not leaf.shape[0]:
            return leaf
        return torch.cat([leaf, leaf[:1]])

    buffers = [(module, dict(buffers_of(module))) for module in model.modules()]
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    more_args, more_kwargs = clone_tensors(pytree.tree_map(longer, (args, dict(kwargs))))
    with contextlib.suppress(Exception), torch.no_grad():
        model(*more_args, **more_kwargs)
    for module, held in buffers:
        buffers_of(module).update(held)
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])
