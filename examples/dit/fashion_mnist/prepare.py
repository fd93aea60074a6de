"""Write Fashion-MNIST's 60,000 training images to data/fashion_mnist, a folder for each class.

    sudo apt-get install dataset-fashion-mnist
    python examples/dit/fashion_mnist/prepare.py [FOLDER]

FOLDER holds the files of https://github.com/zalandoresearch/fashion-mnist; default: where Debian's package puts them.
"""

import gzip
import sys
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ["t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"]
HOME = Path(sys.argv[1] if len(sys.argv) > 1 else "/usr/share/datasets/fashion-mnist")

images = np.frombuffer(gzip.decompress((HOME / "train-images-idx3-ubyte.gz").read_bytes())[16:], np.uint8)
labels = np.frombuffer(gzip.decompress((HOME / "train-labels-idx1-ubyte.gz").read_bytes())[8:], np.uint8)
for name in NAMES:
    Path("data/fashion_mnist", name).mkdir(parents=True, exist_ok=True)
for number, (image, label) in enumerate(zip(images.reshape(-1, 28, 28), labels)):
    Image.fromarray(image).save(f"data/fashion_mnist/{NAMES[label]}/{number:05d}.png")
