"""Print the digest of the text and constants of programs, one line each, as `python -m support.program_texts`."""

import hashlib

from intaglio.codegen import emit
from intaglio.kernels import ISAS
from intaglio.plan import plan_graph, schedule_plan
from support.growing_programs import cached_attention
from support.integer_graphs import Net
from support.programs import CACHES, PROGRAMS, built


def three_layers(net: Net) -> tuple[str, ...]:
    """Six tensors of a cache, whose strides the program reads from each call."""
    return tuple(value for _ in range(3) for value in cached_attention(net))


TEXTS = (*PROGRAMS, three_layers)


def digests() -> list[str]:
    """Return a line for each program."""
    found = []
    for program in TEXTS:
        made = emit(
            schedule_plan(plan_graph(built(program)[1].graph), ISAS["avx512vnni"], CACHES), program.__name__
        ).packed()
        digest = hashlib.sha256(made.source.encode() + made.constants.tobytes()).hexdigest()
        found.append(f"{program.__name__} {digest}")
    return found


if __name__ == "__main__":
    print("\n".join(digests()))
