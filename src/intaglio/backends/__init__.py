"""Backends, which compile a reference model or an integer graph, and the table that lists them.

To add a backend, write a module in this folder with a class that implements `Backend`, and add it to `BACKENDS`.
"""

from intaglio.backends.c_backend import CBackend
from intaglio.backends.inductor.inductor_backend import InductorBackend
from intaglio.backends.native_backend import NativeBackend
from intaglio.backends.onnx.onnx_backend import OnnxBackend
from intaglio.backends.protocol import Backend

BACKENDS: tuple[Backend, ...] = (
    NativeBackend(),  # first: it is the default
    InductorBackend(),
    OnnxBackend(),
    CBackend(),
)

__all__ = ["BACKENDS", "Backend"]
