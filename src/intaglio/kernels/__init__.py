"""Microkernels, one folder per instruction set; a single list of parameters drives selection, tests and benchmarks."""

from collections.abc import Mapping

from intaglio.kernels.amx_int8.amx_tiles import AMX_INT8
from intaglio.kernels.avx2.avx2_tiles import AVX2
from intaglio.kernels.avx512vnni.vnni_tiles import AVX512VNNI
from intaglio.kernels.avxvnni.avxvnni_tiles import AVXVNNI
from intaglio.kernels.depthwise_spec import DepthwiseSpec
from intaglio.kernels.instruction_set import Isa, KernelFamily, depthwise_tiles
from intaglio.kernels.neon.neon_tiles import NEON_DOT, NEON_I8MM
from intaglio.kernels.portable.portable_tiles import PORTABLE
from intaglio.kernels.tile_spec import TileSpec, permutation

ISAS: Mapping[str, Isa] = {
    isa.name: isa for isa in (AMX_INT8, AVX512VNNI, AVXVNNI, AVX2, NEON_I8MM, NEON_DOT, PORTABLE)
}

__all__ = ["ISAS", "DepthwiseSpec", "Isa", "KernelFamily", "TileSpec", "depthwise_tiles", "permutation"]
