"""Fine-tune a timm network on a folder of images with BSAM, with a larger learning rate for the head.

The images are drawn, the weights are random; `bsam.lab.models.weights.load_weights` loads pretrained ones.

Run: python examples/fine_tune.py        (pip install -c constraints.txt '.[images,timm]')
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

import bsam
from bsam.lab.data.augment import normalise
from bsam.lab.data.folders import read_folder
from bsam.lab.data.images import Resize, load_images
from bsam.lab.models import build
from bsam.lab.models.parts import head


def draw_folder(folder, images=30):
    for label, (name, sides) in enumerate({"circle": 60, "square": 4, "triangle": 3}.items()):
        Path(folder, name).mkdir(parents=True)
        for number in range(images):
            random = np.random.default_rng((label, number))
            image = Image.new("RGB", (56, 40), tuple(random.integers(0, 90, 3).tolist()))
            place = tuple(random.integers((22, 18, 11), (34, 22, 16)).tolist())  # centre and radius
            colour = tuple((random.integers(0, 120, 3) + 130 * np.eye(3, dtype=int)[label]).tolist())
            ImageDraw.Draw(image).regular_polygon(place, sides, fill=colour)
            image.save(Path(folder, name, f"{number:03}.png"))


def main(model="timm:test_resnet", epochs=3):
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        draw_folder(folder)
        data, _ = load_images(read_folder(folder), Resize(32), mean=(0.5,) * 3, std=(0.5,) * 3)
        x, test_x = (normalise(part.x, data.mean, data.std) for part in (data.train, data.test))
    network = build(model, data.classes, seed=0)
    new = list(head(network).parameters())
    rest = [p for p in network.parameters() if all(p is not q for q in new)]
    base = torch.optim.SGD([{"params": rest}, {"params": new, "lr": 0.04}], lr=0.02, momentum=0.9, weight_decay=1e-4)
    optimizer = bsam.BSAM(base, network, rho_max=0.05, rho_min=0.05)
    for epoch in range(epochs):
        for batch in torch.randperm(len(x)).split(12):
            loss = optimizer.step(lambda: F.cross_entropy(network(x[batch]), data.train.y[batch]))
        with torch.no_grad():
            accuracy = (network.eval()(test_x).argmax(1) == data.test.y).float().mean().item()
        network.train()
        print(f"epoch {epoch + 1}  loss {loss:.3f}  test accuracy {accuracy:.3f}")
    return network, accuracy


if __name__ == "__main__":
    main()
