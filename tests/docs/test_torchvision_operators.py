"""Plain operators of torchvision that the benchmarks and tests use where its compiled ones do not load."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location

import pytest
import torch

from support.torchvision_stub import OPERATORS, import_torchvision


@pytest.fixture(scope="module")
def plain():
    spec = spec_from_file_location("plain_torchvision_operators", OPERATORS)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nms_keeps_the_best_of_overlapping_boxes(plain):
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30], [0, 0, 10, 5]])
    kept = plain.nms(boxes, torch.tensor([0.5, 0.9, 0.1, 0.3]), 0.4)
    assert kept.tolist() == [1, 3, 2]


def test_nms_of_no_boxes_is_empty(plain):
    assert plain.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []


@pytest.mark.parametrize("sampling_ratio", [2, 0])
def test_roi_align_of_a_ramp_gives_the_centers_of_bins(plain, sampling_ratio):
    ramp = torch.arange(12.0).expand(2, 1, 9, 12)
    rois = torch.tensor([[1.0, 4, 2, 12, 8]])
    found = plain.roi_align(ramp, rois, 0.5, 2, 4, sampling_ratio, False)
    torch.testing.assert_close(found, torch.tensor([2.5, 3.5, 4.5, 5.5]).expand(1, 1, 2, 4))


@pytest.mark.skipif(find_spec("torchvision") is None, reason="compares with torchvision")
def test_roi_align_gives_what_torchvision_gives_inside_of_the_image(plain):
    import_torchvision()
    from torchvision.ops import roi_align

    boxes = torch.tensor([[0.0, 3, 7, 40, 50], [1, 0, 0, 70, 20], [0, 30, 30, 33, 31]])
    features = torch.randn(2, 3, 10, 12)
    expected = roi_align(features, boxes, (3, 2), 0.125, 2, True)
    torch.testing.assert_close(plain.roi_align(features, boxes, 0.125, 3, 2, 2, True), expected)
