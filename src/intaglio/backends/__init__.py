"""Backends: what compiles a reference model or an integer graph, and one table of them.

A new backend is a module beside these with a class that implements `Backend`, and a row in `BACKENDS`.
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
