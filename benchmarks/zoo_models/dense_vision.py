"""Segmentation, detection, video and optical flow of torchvision, and models of Ultralytics."""

from __future__ import annotations

from functools import partial

import torch
import torchvision

from zoo_models.entry import Entry, draw_statistics, image_entry, settle_statistics

SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
VIDEO = ("mc3_18", "mvit_v2_s", "r2plus1d_18", "r3d_18", "s3d", "swin3d_t")
YOLO = (
    "yolo11n",
    "yolo11n-cls",
    "yolo11n-pose",
    "yolo11n-seg",
    "yolo12n",
    "yolo12n-cls",
    "yolo12n-pose",
    "yolo12n-seg",
    "yolov5n",
    "yolov8n",
    "yolov8n-cls",
    "yolov8n-pose",
    "yolov8n-seg",
)
MOST_USED = {
    "deeplabv3_resnet50",
    "fasterrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large",
    "yolo11n",
    "yolo11n-seg",
    "yolov8n",
}


def segmentation(name: str) -> Entry:
    """Return a segmentation model of torchvision by its name."""
    model = getattr(torchvision.models.segmentation, name)(weights=None, weights_backbone=None)
    return image_entry(model, 96, free=True, most_used=name in MOST_USED)


def detection(name: str) -> Entry:
    """Return a whole detector of torchvision by its name, which takes a list of images."""
    sizes = {} if name.startswith("ssd") else {"min_size": 128, "max_size": 160}
    model = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, **sizes).eval()
    draw_statistics(model)

    def batch(count: int) -> tuple[list[torch.Tensor]]:
        return ([torch.rand(3, 128, 144) for _ in range(count)],)

    return Entry(model, batch, {"other sizes": ([torch.rand(3, 100, 160)],)}, most_used=name in MOST_USED)


def video(name: str) -> Entry:
    """Return a video classifier of torchvision by its name."""
    model = getattr(torchvision.models.video, name)(weights=None)
    frames, size = (16, 224) if name in ("mvit_v2_s", "s3d", "swin3d_t") else (8, 64)
    settle_statistics(model, torch.randn(2, 3, frames, size, size))
    return Entry(model.eval(), lambda count: (torch.randn(count, 3, frames, size, size),))


def raft() -> Entry:
    """Return RAFT, which computes the optical flow between two images."""
    model = torchvision.models.optical_flow.raft_small(weights=None)
    draw_statistics(model)
    return Entry(
        model.eval(), lambda count: (torch.rand(count, 3, 128, 128) - 0.5, torch.rand(count, 3, 128, 128) - 0.5)
    )


def yolo(name: str) -> Entry:
    """Return the network of an Ultralytics model by the name of its configuration."""
    from ultralytics.nn import tasks

    kinds = {"-seg": tasks.SegmentationModel, "-pose": tasks.PoseModel, "-cls": tasks.ClassificationModel}
    kind = next((kind for end, kind in kinds.items() if name.endswith(end)), tasks.DetectionModel)
    return image_entry(kind(f"{name}.yaml", verbose=False), 96, free=True, most_used=name in MOST_USED)


MODELS = (
    {name: partial(segmentation, name) for name in SEGMENTATION}
    | {name: partial(detection, name) for name in DETECTION}
    | {name: partial(video, name) for name in VIDEO}
    | {"raft_small": raft}
    | {name: partial(yolo, name) for name in YOLO}
)
