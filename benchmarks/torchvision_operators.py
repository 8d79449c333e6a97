"""Operators of torchvision in plain PyTorch, for a torchvision whose compiled ones do not load.

They do not load beside a CPU build of PyTorch from another index. Importing torchvision wants some of them to exist,
and its detectors call `nms` and `roi_align`.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

ROI_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)


@cache
def declare_operators() -> torch.library.Library | None:
    """Import torchvision, where it is installed, with plain operators in place of missing ones.

    Returns:
        The library of the operators, which exist as long as it does, or ``None`` if nothing is missing.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # torchvision::nms does not exist
        pass
    else:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(ROI_ALIGN)
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CPU")
    library.impl("roi_align", roi_align_shape, "Meta")
    importlib.import_module("torchvision")
    for module in ("torchvision.ops.boxes", "torchvision.ops.roi_align"):
        vars(sys.modules[module]).update(_assert_has_ops=lambda: None, _has_ops=lambda: True)
    return library


def nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the indices of boxes that overlap no better box by more than a threshold, the best box first.

    Args:
        boxes: f32[n, 4], corners (x1, y1, x2, y2).
        scores: f32[n].
        threshold: largest intersection over union.
    """
    order = scores.argsort(descending=True, stable=True)
    found = boxes[order]
    areas = (found[:, 2] - found[:, 0]) * (found[:, 3] - found[:, 1])
    lower = torch.maximum(found[:, None, :2], found[None, :, :2])
    shared = (torch.minimum(found[:, None, 2:], found[None, :, 2:]) - lower).clamp(min=0).prod(2)
    overlaps = (shared / (areas[:, None] + areas - shared) > threshold).numpy()
    dropped = np.zeros(len(order), bool)
    for index in range(len(order)):
        if not dropped[index]:
            dropped[index + 1 :] |= overlaps[index, index + 1 :]
    return order[~torch.from_numpy(dropped)]


def roi_align(
    features: Tensor, rois: Tensor, scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Return the averages of bilinear samples in the bins of boxes, f32[k, c, height, width].

    Bilinear sampling is separable, so each box has one matrix of weights per axis.

    Args:
        features: f32[n, c, h, w].
        rois: f32[k, 5], the index of an image and the corners of a box.
        scale: factor from coordinates of boxes to those of features.
        height: number of bins along the vertical axis.
        width: number of bins along the horizontal axis.
        sampling_ratio: number of samples along each axis of a bin; 0 or less: as many as there are pixels.
        aligned: whether the centers of pixels are at half coordinates.
    """
    result = features.new_zeros(len(rois), features.shape[1], height, width)
    for index, (image, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (corner * scale - 0.5 * aligned for corner in corners)
        rows = bin_weights(y1, y2, height, features.shape[2], sampling_ratio, aligned)
        columns = bin_weights(x1, x2, width, features.shape[3], sampling_ratio, aligned)
        result[index] = rows @ features[int(image)] @ columns.T
    return result


def roi_align_shape(
    features: Tensor, rois: Tensor, scale: float, height: int, width: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Return an empty tensor with the shape of the result of `roi_align`."""
    return features.new_empty(rois.shape[0], features.shape[1], height, width)


def bin_weights(start: float, end: float, bins: int, size: int, sampling_ratio: int, aligned: bool) -> Tensor:
    """Return the weights f32[bins, size] of pixels along one axis in the average of each bin."""
    length = end - start if aligned else max(end - start, 1.0)
    samples = sampling_ratio if sampling_ratio > 0 else max(1, -int(-length // bins))
    place = start + (torch.arange(bins * samples) + 0.5) * (length / bins / samples)
    inside = (place >= -1) & (place <= size)
    place = place.clamp(0, size - 1)
    low = place.long()
    upper = place - low
    weights = torch.zeros(bins * samples, size)
    weights.scatter_add_(1, low[:, None], (1 - upper)[:, None])
    weights.scatter_add_(1, (low + 1).clamp(max=size - 1)[:, None], upper[:, None])
    return (weights * inside[:, None]).reshape(bins, samples, size).mean(1)
