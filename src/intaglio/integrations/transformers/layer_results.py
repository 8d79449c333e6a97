"""Results of layers that models return beside the last one. The library collects them with forward hooks, which it
installs in the first call that asks for them.
"""

from __future__ import annotations

import inspect
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from intaglio.torch_private import call_hooks

RARELY_READ = "attentions"
"""Results that no model asks for to compute others."""


def install(module: nn.Module) -> None:
    """Install the hooks of the outermost models that return results of their layers, with those of models inside."""
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # a release without them
        return
    if _collects(module):
        maybe_install_capturing_hooks(cast(PreTrainedModel, module))
        return
    for child in module.children():
        install(child)


def has_collected_layers(module: nn.Module) -> bool:
    """Return whether a model around a module collects results of layers inside of the module, so that the module cannot
    be one program."""
    if _collects(module):
        return False
    for child in module.children():
        hooks = call_hooks(child)[1].values()
        if not _collects(child) and (any(map(_is_read, hooks)) or has_collected_layers(child)):
            return True
    return False


def _collects(module: nn.Module) -> bool:
    """Return whether a module is a model that returns results of its layers."""
    return isinstance(module, PreTrainedModel) and bool(getattr(module, "_can_record_outputs", None))


def _is_read(hook: object) -> bool:
    """Return whether the results that a hook collects may be read."""
    return not inspect.isfunction(hook) or inspect.getclosurevars(hook).nonlocals.get("key") != RARELY_READ
