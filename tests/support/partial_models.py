"""Small models that cannot be captured as a whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Features(nn.Module):
    """A backbone that returns two maps of features by name."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.out_channels = channels
        self.first = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.first(x)
        return {"fine": fine, "coarse": self.second(fine)}


class Head(nn.Module):
    """Scores and boxes for every place of several maps."""

    def __init__(self, channels: int):
        super().__init__()
        self.scores, self.boxes = nn.Conv2d(channels, 1, 3, padding=1), nn.Conv2d(channels, 4, 1)

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [self.scores(one) for one in maps], [self.boxes(one) for one in maps]


class Detector(nn.Module):
    """Takes a list of images and returns the boxes whose scores are high, as detectors of torchvision do."""

    def __init__(self, most: int = 5):
        super().__init__()
        self.most = most
        self.backbone = Features()
        self.head = Head(self.backbone.out_channels)
        self.refine = nn.Sequential(nn.Linear(8 + 4, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        height = max(image.shape[1] for image in images)
        width = max(image.shape[2] for image in images)
        batch = images[0].new_zeros(len(images), 3, -(-height // 8) * 8, -(-width // 8) * 8)
        for place, image in zip(batch, images, strict=True):
            place[:, : image.shape[1], : image.shape[2]] = image
        maps = list(self.backbone(batch).values())
        assert maps[0].shape[1] == self.backbone.out_channels
        return [self.select(*one) for one in zip(*map(self.flat, (maps, *self.head(maps))), strict=True)]

    @staticmethod
    def flat(maps: list[Tensor]) -> Tensor:
        return torch.cat([one.flatten(2) for one in maps], 2).transpose(1, 2)

    def select(self, features: Tensor, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        scores = scores.squeeze(1).sigmoid()
        best = scores.argsort(descending=True, stable=True)[: self.most]
        best = best[[index for index, score in enumerate(scores[best].tolist()) if score > scores.mean()]]
        found = boxes[best] + self.refine(torch.cat([features[best], boxes[best]], 1))
        return {"boxes": found, "scores": scores[best], "labels": torch.ones_like(best)}


class Routed(nn.Module):
    """Chooses one of two heads by the values of its input."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.bright, self.dark = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x).mean((2, 3))
        return self.bright(features) if x.sum() > 0 else self.dark(features)
