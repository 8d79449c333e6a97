"""AVX-VNNI GEMM microkernels for weights of 4 bits: vpdpbusd, then the sums of 32 input channels times multiples."""

from __future__ import annotations

from collections.abc import Iterator

from intaglio.kernels.avx2.ymm_int4 import LOW, LOW_HALVES, YmmInt4Kernel


class AvxVnniInt4Kernel(YmmInt4Kernel):
    """Prints one kernel."""

    def multiples(self, at: str, second: bool) -> Iterator[str]:
        """Yield the lines that load the multiples to 32-bit lanes."""
        yield f"vpmovzxbd {at},{LOW}"
        yield f"vpsrld $4,{LOW},{LOW}" if second else f"vpand {LOW_HALVES},{LOW},{LOW}"

    def product(self, weights: str, activations: str, sums: str, first: bool) -> Iterator[str]:
        """Yield the lines that add the products of 4 input channels in 32-bit lanes."""
        if first:
            yield f"vpxor {sums},{sums},{sums}"
        yield f"{{vex}} vpdpbusd {weights},{activations},{sums}"

    def scaled(self, sums: str) -> Iterator[str]:
        """Yield the line that multiplies 32-bit lanes."""
        yield f"vpmulld {LOW},{sums},{sums}"
