"""Document 000's `Parent` and `Child`, quantized while they run: the state each module has, and what is intercepted.

python examples/define_by_run.py
"""

from __future__ import annotations

import torch
from torch import nn

import intaglio
from intaglio import stages


class Child(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1)
        self.child = Child()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = self.child(x)
        return x


def hierarchy(module: nn.Module, name: str = "m", depth: int = 0) -> None:
    """Modules, and which of them have a state."""
    print(f"{'   ' * depth}{name} ({type(module).__name__})")
    state = getattr(module, "_auto_quant_state", None)
    if state is not None:
        print(f"{'   ' * (depth + 1)}_auto_quant_state ({type(state).__name__})")
    for child, inner in module.named_children():
        hierarchy(inner, child, depth + 1)


def main() -> None:
    torch.manual_seed(0)
    m = Parent().eval()
    batches = [torch.randn(2, 1, 8, 8) for _ in range(4)]
    print("given:")
    hierarchy(m)
    print("would fuse:", intaglio.eager.fusions(m, batches[0]))

    prepared = intaglio.eager.prepare(m, batches[0], intaglio.Recipe.of({"*": {"results": "int8"}}))
    print("\nprepared:")
    hierarchy(prepared)
    for batch in batches:
        prepared(batch)
    print("\nm.child, prepared:", prepared.child._auto_quant_state, sep="\n")

    converted = intaglio.eager.convert(prepared)
    print("\nm, converted:", converted._auto_quant_state, sep="\n")
    print("\nm.child, converted:", converted.child._auto_quant_state, sep="\n")

    with intaglio.eager.calls() as log:
        y = converted(batches[0])
    print("\nintercepted:")
    for number, call in enumerate(log, 1):
        where = f"m.{call.path}" if call.path else "m"
        print(f"{number}. {where}{f'::{call.operator}' if call.operator else ''} {call.moment}")
    print("\nresult:", y.dtype, tuple(y.shape))

    reference = intaglio.eager.rewrite(converted)
    print("\nthe explicit graph:", reference.text(), sep="\n")
    print("compiled, the same bits:", torch.equal(stages.compile(reference)(batches[0]), y))


if __name__ == "__main__":
    main()
