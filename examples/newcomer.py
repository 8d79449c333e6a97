"""The whole way with a torchvision network and a DataLoader: quantize, save, load in a new process, compare.

    pip install intaglio torchvision
    python examples/newcomer.py                 ResNet-18 on 64 images
    python examples/newcomer.py mobilenet_v2    any classifier of torchvision

The weights are random and the images are noise, so that nothing is downloaded. For your own network, put your weights
into `network` and your images into `loader`.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import intaglio

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.get_model(name, weights=None).eval()


def loader(count: int, image: int) -> DataLoader:
    """(images, labels) batches, as a training script has them; intaglio finds out that labels are not for forward."""
    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    images = torchvision.datasets.FakeData(count, (3, image, image), transform=v2.Compose(steps))
    return DataLoader(images, batch_size=8)


def serve(path: Path, images: Path, answers: Path) -> None:
    """What runs where the model is used: nothing of the network's code, no torchvision, no recipe."""
    torch.save(intaglio.load(path)(torch.load(images)), answers)


def compare(name: str, count: int, image: int, folder: Path) -> None:
    model, data = network(name), loader(count, image)
    quantized = intaglio.quantize(model, data, input=intaglio.Image(MEAN, STD))
    print(quantized.coverage)
    quantized.assert_int8(macs=0.99)

    images = torch.cat([batch for batch, _ in data])
    path, given, answers = folder / "model.intaglio", folder / "images.pt", folder / "answers.pt"
    quantized.save(path, example=images[:1])
    torch.save(images, given)
    subprocess.run([sys.executable, __file__, "--serve", str(path), str(given), str(answers)], check=True)

    with torch.no_grad():
        wanted = model(images)
    here, there = quantized(images), torch.load(answers)
    noise = (here - wanted).square().sum() / wanted.square().sum()
    agreed = (here.argmax(1) == wanted.argmax(1)).float().mean()
    print(f"float model: {quantized.coverage.bytes_before / 1e6:.1f} MB; file: {path.stat().st_size / 1e6:.1f} MB")
    print(f"int8 against float: {-10 * noise.log10():.1f} dB, same class for {100 * agreed:.0f} % of {count} images")
    print("the new process gives", "the same bits" if torch.equal(here, there) else "OTHER BITS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="resnet18")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--serve", nargs=3, type=Path, metavar=("MODEL", "IMAGES", "ANSWERS"))
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(arguments.name, arguments.images, arguments.size, Path(folder))


if __name__ == "__main__":
    main()
