"""AVX2 GEMM microkernels for weights of 4 bits: vpmaddubsw, whose 16-bit sums of 32 input channels cannot overflow.

A 16-bit lane has two of every four input channels, 16 of a group of 32. The sum of their products is in
``16 * 255 * -8 .. 16 * 255 * 7``, that is, in -32640..28560. vpmaddwd multiplies both lanes of an output channel by
the multiple and adds them.
"""

from __future__ import annotations

from collections.abc import Iterator

from intaglio.kernels.avx2.ymm_int4 import LOW, LOW_HALVES, YMM_INT4_CONSTANTS, YmmInt4Kernel

AVX2_INT4_CONSTANTS = {
    **YMM_INT4_CONSTANTS,
    "intaglio_multiples": "".join(
        f"    .byte {','.join(str(value) for t in range(4) for value in (4 * lane + t, 128) * 2)}\n"
        for lane in range(2)
    ),
}
"""Constants of the kernels; byte ``4 * lane + t`` of 8 multiples to both 16-bit lanes of dword t."""


class Avx2Int4Kernel(YmmInt4Kernel):
    """Prints one kernel."""

    def multiples(self, at: str, second: bool) -> Iterator[str]:
        """Yield the lines that load the multiples to both 16-bit lanes of a channel."""
        yield f"vpbroadcastq {at},{LOW}"
        yield f"vpshufb intaglio_multiples(%rip),{LOW},{LOW}"
        yield f"vpsrlw $4,{LOW},{LOW}" if second else f"vpand {LOW_HALVES},{LOW},{LOW}"

    def product(self, weights: str, activations: str, sums: str, first: bool) -> Iterator[str]:
        """Yield the lines that add the products of pairs of input channels in 16-bit lanes."""
        yield f"vpmaddubsw {weights},{activations},{sums if first else activations}"
        if not first:
            yield f"vpaddw {activations},{sums},{sums}"

    def scaled(self, sums: str) -> Iterator[str]:
        """Yield the line that multiplies two 16-bit lanes and adds them."""
        yield f"vpmaddwd {LOW},{sums},{sums}"
