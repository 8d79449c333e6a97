"""Compare the boxes of int8 and float detectors that are trained on drawn shapes for a minute.

    python benchmarks/detectors.py                      all of them
    python benchmarks/detectors.py retinanet yolov8n    two of them

Detectors with random weights find nothing, or noise. These learn to find squares and discs of random size and colour
in noise, in some minutes on two cores: detectors of torchvision around a small backbone, and networks of Ultralytics.
Then each is quantized as it is, and its boxes on new images are compared with those of the float model: the share of
float boxes with an int8 box of the same class that overlaps by 0.5 or 0.9, the difference of scores, and the share of
drawn shapes that both find.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import networks
import torch
from torch import Tensor, nn

import intaglio

SIZE, SHAPES = 128, 3
"""Height and width of images, and the largest number of shapes in one."""
STEPS, BATCH = 400, 8
TESTED, CALIBRATED = 64, 64
SCORE = 0.5
"""Score from which a box counts."""


@dataclass
class Found:
    """Boxes in one image.

    Attributes:
        boxes: corners in pixels, f32[n, 4].
        labels: 1 for a square and 2 for a disc, i64[n].
        scores: f32[n].
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor


Detect = Callable[[nn.Module, list[Tensor]], list[Found]]


def draw(generator: torch.Generator) -> tuple[Tensor, Found]:
    """Return an image with some shapes, f32[3, SIZE, SIZE] in 0..1, and their boxes."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * (high - low) + low

    image = uniform(0, 0.3, 3, SIZE, SIZE)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    boxes, labels = [], []
    for _ in range(int(torch.randint(1, SHAPES + 1, (), generator=generator))):
        radius = int(uniform(7, 26, ()))
        x, y = (int(uniform(radius, SIZE - radius, ())) for _ in range(2))
        box = torch.tensor([x - radius, y - radius, x + radius, y + radius]).float()
        if boxes and overlaps(box[None], torch.stack(boxes)).max() > 0.05:
            continue
        disc = bool(torch.randint(0, 2, (), generator=generator))
        inside = (columns - x) ** 2 + (rows - y) ** 2 < radius**2
        inside = inside if disc else ((columns - x).abs() < radius) & ((rows - y).abs() < radius)
        image[:, inside] = uniform(0.5, 1, 3, 1) + uniform(-0.1, 0.1, 3, int(inside.sum()))
        boxes.append(box)
        labels.append(1 + disc)
    return image.clamp(0, 1), Found(torch.stack(boxes), torch.tensor(labels), torch.ones(len(boxes)))


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of every pair of boxes, f32[n, m]."""
    lower = torch.maximum(first[:, None, :2], second[None, :, :2])
    shared = (torch.minimum(first[:, None, 2:], second[None, :, 2:]) - lower).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def matches(wanted: Found, found: Found, overlap: float) -> list[tuple[int, int]]:
    """Return pairs of boxes of the same class that overlap, each box at most once, the best wanted box first."""
    pairs, taken = [], set[int]()
    if not len(found.boxes):
        return []
    shared = overlaps(wanted.boxes, found.boxes) * (wanted.labels[:, None] == found.labels)
    for place in wanted.scores.argsort(descending=True, stable=True).tolist():
        best = max((i for i in range(len(found.boxes)) if i not in taken), key=lambda i: shared[place, i], default=None)
        if best is not None and shared[place, best] >= overlap:
            pairs.append((place, best))
            taken.add(best)
    return pairs


class Backbone(nn.Sequential):
    """Four convolutions with batch norm, which reduce images by 8."""

    out_channels = 64

    def __init__(self) -> None:
        widths = (3, 16, 32, 64, 64)
        super().__init__(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 1 + (i < 3), 1), nn.BatchNorm2d(b), nn.ReLU())
                for i, (a, b) in enumerate(pairwise(widths))
            )
        )


def of_torchvision(name: str) -> nn.Module:
    """Return a detector of torchvision around a small backbone."""
    from torchvision.models import detection as models
    from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator

    sizes = {"min_size": SIZE, "max_size": SIZE, "image_mean": [0.3] * 3, "image_std": [0.3] * 3}
    anchors = AnchorGenerator(((16, 32, 48),), ((1.0,),))
    if name == "fasterrcnn":
        from torchvision.ops import MultiScaleRoIAlign

        pool = MultiScaleRoIAlign(["0"], 7, 2)
        return models.FasterRCNN(Backbone(), 3, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes)
    if name == "retinanet":
        return models.RetinaNet(Backbone(), 3, anchor_generator=anchors, **sizes)
    if name == "fcos":
        return models.FCOS(Backbone(), 3, anchor_generator=AnchorGenerator(((8,),), ((1.0,),)), **sizes)
    boxes = DefaultBoxGenerator([[]], scales=[0.2, 0.4], steps=[8])
    return models.SSD(Backbone(), boxes, (SIZE, SIZE), 3, image_mean=sizes["image_mean"], image_std=sizes["image_std"])


def torchvision_loss(model: nn.Module, images: list[Tensor], targets: list[Found]) -> Tensor:
    losses = model(images, [{"boxes": one.boxes, "labels": one.labels} for one in targets])
    return sum(losses.values())


def torchvision_boxes(model: nn.Module, images: list[Tensor]) -> list[Found]:
    found = [{key: values[one["scores"] > SCORE] for key, values in one.items()} for one in model(images)]
    return [Found(one["boxes"], one["labels"], one["scores"]) for one in found]


def of_ultralytics(name: str) -> nn.Module:
    """Return the network of an Ultralytics model with two classes."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(f"{name}.yaml", nc=2, verbose=False)
    model.args = get_cfg()
    return model


def ultralytics_loss(model: nn.Module, images: list[Tensor], targets: list[Found]) -> Tensor:
    boxes = torch.cat([one.boxes for one in targets]) / SIZE
    batch = {
        "img": torch.stack(images),
        "batch_idx": torch.cat([torch.full((len(one.boxes),), i).float() for i, one in enumerate(targets)]),
        "cls": torch.cat([one.labels - 1 for one in targets])[:, None].float(),
        "bboxes": torch.cat(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]), 1),
    }
    return model(batch)[0].sum()


def ultralytics_boxes(model: nn.Module, images: list[Tensor]) -> list[Found]:
    from ultralytics.utils.nms import non_max_suppression

    found = non_max_suppression(model(torch.stack(images))[0], SCORE, 0.5)
    return [Found(one[:, :4], one[:, 5].long() + 1, one[:, 4]) for one in found]


TORCHVISION, ULTRALYTICS = ("fasterrcnn", "retinanet", "fcos", "ssd"), ("yolov5n", "yolov8n", "yolo11n", "yolo12n")
DETECTORS: dict[str, tuple[Callable[[], nn.Module], Any, Detect]] = {
    name: (partial(of_torchvision, name), torchvision_loss, torchvision_boxes) for name in TORCHVISION
} | {name: (partial(of_ultralytics, name), ultralytics_loss, ultralytics_boxes) for name in ULTRALYTICS}


def trained(name: str, steps: int) -> nn.Module:
    """Return a detector that was trained on drawn images, in evaluation mode."""
    torch.manual_seed(0)
    build, loss_of, _ = DETECTORS[name]
    model, generator = build().train(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for _ in range(steps):
        images, targets = zip(*(draw(generator) for _ in range(BATCH)), strict=True)
        optimizer.zero_grad()
        loss_of(model, list(images), list(targets)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def compared(name: str, steps: int) -> dict[str, float]:
    """Return how far the boxes of an int8 detector agree with those of the float model."""
    model, detect = trained(name, steps), DETECTORS[name][2]
    generator = torch.Generator().manual_seed(1)
    drawn = [draw(generator) for _ in range(TESTED + CALIBRATED)]
    images = [image for image, _ in drawn[TESTED:]]
    groups = [images[i : i + BATCH] for i in range(0, CALIBRATED, BATCH)]
    batches = [(group,) if name in TORCHVISION else torch.stack(group) for group in groups]
    int8 = intaglio.quantize(model, batches, progress=False)
    print(int8.coverage, flush=True)
    boxes = {"float": [], "int8": []}
    with torch.no_grad():
        for start in range(0, TESTED, BATCH):
            group = [image for image, _ in drawn[start : start + BATCH]]
            boxes["float"] += detect(model, group)
            boxes["int8"] += detect(int8, group)
    targets = [target for _, target in drawn[:TESTED]]
    total = sum(len(one.boxes) for one in targets)
    count = sum(len(one.boxes) for one in boxes["float"])
    pairs = list(zip(boxes["float"], boxes["int8"], strict=True))
    scores = [(a.scores[i] - b.scores[j]).abs() for a, b in pairs for i, j in matches(a, b, 0.5)]
    return {
        "macs_int8": int8.coverage.macs,
        "float boxes": count,
        "int8 boxes": sum(len(one.boxes) for one in boxes["int8"]),
        "agree at 0.5": sum(len(matches(a, b, 0.5)) for a, b in pairs) / max(count, 1),
        "agree at 0.9": sum(len(matches(a, b, 0.9)) for a, b in pairs) / max(count, 1),
        "score difference": float(torch.stack(scores).mean()) if scores else float("nan"),
        "shapes found in float": sum(len(matches(t, a, 0.5)) for t, (a, _) in zip(targets, pairs, strict=True)) / total,
        "shapes found in int8": sum(len(matches(t, b, 0.5)) for t, (_, b) in zip(targets, pairs, strict=True)) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(DETECTORS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    library = networks.declare_operators()
    for name in arguments.names or DETECTORS:
        found = compared(name, arguments.steps)
        print(f"{name:12}", {key: round(value, 4) for key, value in found.items()}, flush=True)
    del library  # operators exist as long as their library


if __name__ == "__main__":
    main()
