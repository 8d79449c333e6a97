"""The operators that torch.onnx has for ATen, which it reads from source at every export, kept in this process."""

from functools import cache

from torch.onnx._internal.exporter._registration import ONNXRegistry

READ = ONNXRegistry.from_torchlib


@cache
def _kept(opset_version: int) -> ONNXRegistry:
    return READ(opset_version)


def registry_of_torchlib(opset_version: int = READ.__func__.__defaults__[0]) -> ONNXRegistry:
    """Return what ``ONNXRegistry.from_torchlib`` does: a copy, as an export may add operators to its own."""
    kept, copied = _kept(opset_version), ONNXRegistry()
    vars(copied).update(vars(kept) | {"functions": {name: list(found) for name, found in kept.functions.items()}})
    return copied
