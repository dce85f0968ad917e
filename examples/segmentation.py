"""Semantic segmentation: drawn shapes or Oxford-IIIT Pet's trimaps, a small U-Net, mean IoU, pictures.

bsam compare --task segmentation:Segmentation --methods base sam bsam --tune --out runs/shapes
"""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from bsam.lab import Preset, Score, Splits, Task, TaskSettings, setting

SHAPES, TRIMAP = ["background", "disc", "square", "triangle"], ["animal", "background", "border"]
COLOURS = torch.tensor([[0, 0, 0], [230, 159, 0], [86, 180, 233], [0, 158, 115]], dtype=torch.uint8)


def shapes(image_size=32):
    """Draw a disc, a square and a triangle on noise."""
    rng, side = np.random.default_rng(0), image_size
    row, column = np.mgrid[:side, :side]

    def draw(count):
        images = rng.integers(0, 120, (count, 3, side, side), dtype=np.uint8)
        masks = np.zeros((count, side, side), dtype=np.int64)
        for image, mask in zip(images, masks, strict=True):
            for label in 1 + rng.permutation(3):
                (y, x), r = rng.integers(side // 5, side - side // 5, 2), rng.integers(side // 8, side // 4)
                disc = np.hypot(row - y, column - x) <= r
                square = np.maximum(abs(row - y), abs(column - x)) <= r
                triangle = (row <= y + r) & (row - y + r >= 2 * abs(column - x))
                inside = (disc, square, triangle)[label - 1]
                mask[inside] = label
                image[:, inside] = image[:, inside] // 2 + rng.integers(60, 130, (3, 1), dtype=np.uint8)
        return images, masks

    return Splits(train=draw(240), test=draw(80), facts={"classes": 4, "names": SHAPES})


def pets(data_dir, image_size=64):
    """Read the two unpacked archives of Oxford-IIIT Pet."""

    size = (image_size, image_size)

    def read(split):
        names = [line.split()[0] for line in (data_dir / f"annotations/{split}.txt").read_text().splitlines()]
        photos = [Image.open(data_dir / f"images/{name}.jpg").convert("RGB").resize(size) for name in names]
        trimaps = [Image.open(data_dir / f"annotations/trimaps/{name}.png") for name in names]
        masks = [trimap.resize(size, Image.Resampling.NEAREST) for trimap in trimaps]
        targets = [np.asarray(mask, dtype=np.int64) - 1 for mask in masks]
        return np.stack(photos).transpose(0, 3, 1, 2), np.stack(targets)

    return Splits(train=read("trainval"), test=read("test"), facts={"classes": 3, "names": TRIMAP})


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True))


class UNet(nn.Module):
    """Two stages down and two up, with skip connections."""

    def __init__(self, classes, width):
        super().__init__()
        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.middle(F.max_pool2d(two, 2))
        two = self.up2(torch.cat([two, F.interpolate(low, scale_factor=2.0)], 1))
        return self.head(self.up1(torch.cat([one, F.interpolate(two, scale_factor=2.0)], 1)))


@dataclass(frozen=True, kw_only=True)
class SegmentationSettings(TaskSettings):
    width: int = setting(8, "channels of the U-Net's first stage")


class Segmentation(Task):
    settings_type = SegmentationSettings
    score = Score("miou", "mean IoU in %", factor=100)
    datasets = {"shapes": shapes, "pets": pets}
    networks = {"unet": UNet}
    presets = (Preset(base="adamw", epochs=30, batch=16), Preset(when={"base": "adamw"}, lr=3e-3, weight_decay=0.01))

    def augment(self, x, y, *, generator):
        flip = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)[:, None, None]
        return torch.where(flip[:, None], x.flip(-1), x), torch.where(flip, y.flip(-1), y)

    def losses(self, outputs, y):
        return F.cross_entropy(outputs, y, reduction="none").mean((1, 2))

    def sums(self, outputs, y):
        found, truth = (F.one_hot(mask, self.facts["classes"]).bool() for mask in (outputs.argmax(1), y))
        return {"both": (found & truth).sum((1, 2)), "either": (found | truth).sum((1, 2))}

    def scores(self, means):
        iou = means["both"] / means["either"].clamp(min=1e-9)
        parts = {f"miou_{name}": float(share) for name, share in zip(self.facts["names"], iou, strict=True)}
        return {"miou": float(iou.mean()), **parts}

    def chance(self):
        counts = torch.bincount(self.evaluation[1].flatten(), minlength=self.facts["classes"])
        return float(counts.max() / counts.sum()) / len(counts)  # one class everywhere

    def read(self, path):
        size = self.facts["input_shape"][1:]
        return torch.from_numpy(np.array(Image.open(path).convert("RGB").resize(size))).permute(2, 0, 1)

    def values(self, outputs):
        shares = F.one_hot(outputs.argmax(1), self.facts["classes"]).float().mean((1, 2))
        return [dict(zip(self.facts["names"], row.tolist(), strict=True)) for row in shares]

    def draw(self, x, outputs, y=None):
        masks = [outputs.argmax(1)] if y is None else [y, outputs.argmax(1)]
        return torch.cat([x.permute(0, 2, 3, 1).cpu(), *(COLOURS[mask.cpu()] for mask in masks)], 2).numpy()
