"""Crops of scikit-learn's two photographs."""

from pathlib import Path

from PIL import Image


def cut_photographs(folder: Path) -> None:
    """Write 30 crops of 48 pixels of each photograph, in a folder each."""
    from sklearn.datasets import load_sample_images

    for name, pixels in zip(("china", "flower"), load_sample_images().images):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            top, left = 60 * (number // 6), 90 * (number % 6)
            Image.fromarray(pixels[top : top + 48, left : left + 48]).save(folder / name / f"{number:02d}.png")
