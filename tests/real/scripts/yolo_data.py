"""Images with boxes in YOLO's layout, or in folders by class."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

kind, folder = sys.argv[1], Path(sys.argv[2])
make = np.random.default_rng(0)


def image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(make.integers(0, 256, (96, 96, 3), dtype=np.uint8)).save(path)


for split, count in (("train", 96), ("val", 16)):
    for index in range(count):
        if kind == "classify":
            image(folder / split / f"class{index % 3}" / f"{index}.jpg")
            continue
        image(folder / "images" / split / f"{index}.jpg")
        label = folder / "labels" / split / f"{index}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        boxes = make.uniform(0.2, 0.8, (3, 4)) * [1, 1, 0.3, 0.3]
        label.write_text("".join(f"{n % 2} {' '.join(map(str, b))}\n" for n, b in enumerate(boxes)))
if kind == "detect":
    (folder / "data.yaml").write_text(
        f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {{0: a, 1: b}}\n"
    )
