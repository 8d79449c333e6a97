"""The listing of "Quantization 2.0" (document 002) with intaglio's names: trace, prepare, calibrate, convert, and lower
the reference model with TorchInductor.

    python examples/export_inductor.py
"""

import torch

from intaglio import stages


class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 10)

    def forward(self, x):
        return self.linear(x)


def main() -> None:
    torch.manual_seed(0)
    example_inputs = (torch.randn(1, 5),)
    model = M().eval()

    # Step 1: Trace the model into an FX graph of flattened ATen operators
    captured = stages.capture(model, example_inputs)

    # Step 2: Insert observers, and calibrate
    prepared = stages.prepare(captured, stages.Quantizer())
    ranges = stages.calibrate(prepared, [example_inputs])

    # Step 3: Quantize the model
    reference = stages.convert(prepared, ranges)

    # Step 4: Lower the reference model into the backend
    compiled = stages.compile(reference, backend="inductor", example_inputs=example_inputs)

    print(compiled)
    print(compiled.report)
    difference = (compiled(*example_inputs) - reference(*example_inputs)).abs().max().item()
    print(f"as the reference, but for {difference:.0e}")


if __name__ == "__main__":
    main()
