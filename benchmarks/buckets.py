"""Measure how much of a photograph buckets keep that a square crop throws away, and how long ranks wait for each other.

    python benchmarks/buckets.py FOLDER [--copies 40] [--area 65536] [--group 8]

FOLDER: images, e.g. skimage/data of scikit-image's wheel; only their headers are read. A rank waits from the end of its
micro-batches of a step to the end of the slowest rank's. The wait is counted in FLOP of a DiT-XL/2: nothing is timed.
Each image counts --copies times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import Report

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.source import Budget, format_sizes
from mindspeed_mm_dit.data.buckets import count_shapes, fraction_after_crop, shapes_of
from mindspeed_mm_dit.data.check_images import check_image_files
from mindspeed_mm_dit.data.order import BucketOrder, micro_batches
from mindspeed_mm_dit.data.transforms import SUFFIXES
from mindspeed_mm_dit.models.data import with_size
from mindspeed_mm_dit.planning import train_flop

MODEL = Path(__file__).parent.parent / "examples/dit/imagenet256/model.json"
RANKS, ROUNDS, STEPS = (2, 4, 8), (1, 2, 4), 200


def main() -> None:
    """Measure and write the result file."""
    args = parse()
    sizes = np.repeat(sizes_in(args.folder), args.copies, axis=0)
    param = DatasetParam(args.folder, buckets=Budget(args.area, 16, 2.0), bucket_group=args.group)
    shapes = shapes_of(sizes, param)
    kept, square = fraction_after_crop(sizes, shapes).mean(), (sizes.min(1) / sizes.max(1)).mean()
    report = Report(
        "buckets", f"{len(sizes) // args.copies} photographs of {len(np.unique(sizes, axis=0))} sizes in buckets"
    )
    report.echo(
        f"Of a picture's area {kept:.1%} is kept, by a square crop {square:.1%}: {kept / square:.2f} times as much."
    )
    report.table(
        ["bucket", "pictures"],
        [[format_sizes([shape]), str(count // args.copies)] for shape, count in count_shapes(shapes)],
    )
    costs = flop_of(shapes)
    report.table(
        ["ranks", "micro-batches a rank and step", "idle: as they come", "dealt in turns, the largest first"],
        [[str(ranks), str(rounds), *(f"{idle:.1%}" for idle in idle_of(shapes, costs, args, ranks, rounds))]
         for ranks in RANKS for rounds in ROUNDS],
    )  # fmt: skip
    report.save()


def sizes_in(folder: str) -> np.ndarray:
    """Return (height, width) of every picture of a folder, (N, 2)."""
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in SUFFIXES)
    looks = [look for look in check_image_files(paths, 256, decode=False) if look.problem is None]
    return np.array([(look.height, look.width) for look in looks])


def flop_of(shapes: np.ndarray) -> np.ndarray:
    """Return the FLOP of a training step for one sample of each shape, (N,)."""
    model = load_model_config(MODEL)
    each = {shape: train_flop(with_size(model, shape).predictor) for shape, _ in count_shapes(shapes)}
    return np.array([each[tuple(shape)] for shape in shapes.tolist()])


def idle_of(shapes: np.ndarray, costs: np.ndarray, args: argparse.Namespace, ranks: int, rounds: int) -> list[float]:
    """Return the part of the ranks' time that they wait, without dealing and with it."""
    buckets = np.unique(shapes, axis=0, return_inverse=True)[1].reshape(-1)
    order = BucketOrder(buckets, args.group, seed=0, costs=shapes.prod(1))
    ways = (micro_batches, order.micro_batches)
    return [
        waited([way(0, args.group, rank, ranks, rounds) for rank in range(ranks)], order, costs, rounds) for way in ways
    ]


def waited(own: list[Iterator[np.ndarray]], order: BucketOrder, costs: np.ndarray, rounds: int) -> float:
    """Return the part of the time of STEPS steps that ranks wait for the slowest one."""
    busy = np.array(
        [
            [sum(costs[order.images(next(sample_indices))].sum() for _ in range(rounds)) for sample_indices in own]
            for _ in range(STEPS)
        ]
    )
    return float(1 - busy.mean(1).sum() / busy.max(1).sum())


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--copies", type=int, default=40)
    parser.add_argument("--area", type=int, default=256 * 256)
    parser.add_argument("--group", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
