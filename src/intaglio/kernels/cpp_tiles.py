"""Parts of GEMM microkernels in C++."""

from __future__ import annotations

from intaglio.kernels.instruction_set import KernelFamily
from intaglio.kernels.tile_spec import TileSpec


def cpp_kernel(spec: TileSpec, products: str, prefix: str = "finish", before: str = "") -> str:
    """Return the text of one kernel.

    Args:
        spec: the parameters of the kernel.
        products: statements that declare and compute the sums ``acc`` of a tile ``t``.
        prefix: prefix of the functions that store the results of these sums.
        before: statements in front of the loop over tiles.
    """
    kinds = {"u8": [spec.remainder], "add": [spec.remainder, spec.residual_remainder]}.get(spec.result, [])
    numbers = ", ".join(str(int(number)) for number in (spec.rows, *kinds))
    body = f"{products}; {prefix}_{spec.result}(t, acc, {numbers}); next_tile(t, {spec.rows});"
    return f"static void {spec.name}(struct Tile* t) {{ {before}for (; t->count; --t->count) {{ {body} }} }}\n"


def cpp_family(family: KernelFamily, texts: list[str], header: str) -> str:
    """Return the text of a family of kernels that call functions of a header."""
    names = ", ".join(kernel.name if kernel is not None else "0" for kernel in family.kernels)
    table = f"const {family.element} {family.name}[] = {{{names}}};\n"
    return "".join([f'#include "{header}"\n\n', *texts, f"\n{family.declaration}\n{table}"])
