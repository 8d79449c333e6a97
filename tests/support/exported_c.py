"""Exported programs, built with a plain compiler and called through their header's functions."""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from intaglio.ir import DType
from intaglio.runtime import QuantizedModel
from intaglio.signature import TORCH_DTYPES

OK, ARGUMENT, FILE, FOREIGN, DAMAGED, PROCESSOR, MEMORY, SHAPE, UNPLANNED, INDEX = range(10)
KINDS = {
    i: TORCH_DTYPES[DType(name)]
    for i, name in enumerate(("u8", "s8", "u16", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "bool"), 1)
}
CODES = {dtype: code for code, dtype in KINDS.items()}
P, I32, I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class Value(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("shape", ctypes.c_char_p),
        ("dtype", I32),
        ("rank", I32),
        ("sizes", ctypes.POINTER(I64)),
    )


def commands(folder: Path) -> list[str]:
    """Lines of README.txt that build the program without CMake."""
    text = (folder / "README.txt").read_text()
    return [line.strip() for line in re.findall(r"^    (?:FLAGS=|gcc ).*$", text, re.MULTILINE)]


def build(folder: Path, compiler: str | None = None) -> Path:
    """Build a shared library by the commands of README.txt, and check that it needs no other library."""
    name = next(folder.glob("*.h")).stem
    link(folder, compiler or "gcc", f"-shared -Wl,--no-undefined -o lib{name}.so")
    return folder / f"lib{name}.so"


def link(folder: Path, compiler: str, flags: str, further: str = "") -> None:
    """Compile the sources of an export by the commands of README.txt, and link the objects without ``main.c``.

    Args:
        folder: folder that `export_c` wrote.
        compiler: command that replaces ``gcc``.
        flags: flags of the command that links, with ``-o``.
        further: flags of all commands, which follow those of README.txt.
    """
    usual, *lines = [line.replace("gcc", compiler, 1) for line in commands(folder)[:-2]]
    lines = [usual, f'FLAGS="$FLAGS {further}"', *lines, "rm -f main.o", f"{compiler} -pthread {further} *.o {flags}"]
    subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=folder, check=True)


class Library:
    """The library of a folder; ``name_function`` is ``library.function``."""

    def __init__(self, path: Path) -> None:
        self.library, self.name = ctypes.CDLL(str(path)), path.stem.removeprefix("lib")
        for name in ("input", "output"):
            getattr(self, name).restype = ctypes.POINTER(Value)
        for name in ("output_bytes", "input_bytes"):
            getattr(self, name).restype = ctypes.c_size_t
        self.output_sizes.restype = ctypes.POINTER(I64)
        self.isa.restype = self.error.restype = ctypes.c_char_p
        self.open_memory.argtypes = (P, ctypes.c_size_t, P)
        self.close.argtypes = self.isa.argtypes = (P,)
        self.output_sizes.argtypes = self.output_bytes.argtypes = self.input_bytes.argtypes = (P, I32)
        self.resize.argtypes, self.run.argtypes = (P, P), (P, P, P, I32)
        self.read_as.argtypes = (P, I32, I32, P)

    def __getattr__(self, name: str):
        return getattr(self.library, f"{self.name}_{name}")


class Exported:
    """One handle."""

    def __init__(self, library: Library, weights: Path) -> None:
        self.library, self.handle = library, P()
        assert library.open(str(weights).encode(), ctypes.byref(self.handle)) == OK

    def __call__(self, *tensors: Tensor, threads: int = 2) -> list[Tensor]:
        assert (status := self.resize([tensor.shape for tensor in tensors])) == OK, self.library.error(status)
        for index, tensor in enumerate(tensors):
            strides = (I64 * max(tensor.dim(), 1))(*tensor.stride())
            assert self.library.read_as(self.handle, index, CODES[tensor.dtype], strides) == OK
        outputs = self.outputs()
        assert (status := self.run(tensors, outputs, threads)) == OK, self.library.error(status)
        return outputs

    def resize(self, shapes: Sequence[Sequence[int]]) -> int:
        rows = [(I64 * max(len(shape), 1))(*shape) for shape in shapes]
        return self.library.resize(self.handle, (P * (len(rows) + 1))(*[ctypes.addressof(row) for row in rows]))

    def outputs(self) -> list[Tensor]:
        """Memory for them."""
        values = [self.library.output(i).contents for i in range(self.library.outputs())]
        sizes = [self.library.output_sizes(self.handle, i) for i in range(len(values))]
        made = [torch.zeros(s[: v.rank], dtype=KINDS[v.dtype]) for s, v in zip(sizes, values, strict=True)]
        assert [t.nbytes for t in made] == [self.library.output_bytes(self.handle, i) for i in range(len(made))]
        return made

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], threads: int = 2) -> int:
        given, made = ((P * (len(ts) + 1))(*[t.data_ptr() for t in ts]) for ts in (inputs, outputs))
        return self.library.run(self.handle, given, made, threads)

    def close(self) -> None:
        self.library.close(self.handle)


def exported(model: QuantizedModel, folder: Path, isa: str | Sequence[str] | None = None) -> Exported:
    """The model through its export."""
    model.export_c(folder, isa=isa)
    return Exported(Library(build(folder)), folder / "weights.bin")
