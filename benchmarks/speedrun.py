"""Whose code draws the best clothes after 1, 5 and 20 CPU minutes of training? Fashion-MNIST, one thread.

    sudo apt-get install dataset-fashion-mnist
    pip install smalldiffusion==0.5.0 denoising-diffusion-pytorch==2.3.4 diffusers timm    # the other contestants
    export OMP_NUM_THREADS=1
    python benchmarks/speedrun.py --contestants real ours --budgets 5       # ours, about 6 minutes
    python benchmarks/speedrun.py --checkouts DIR --grid --seeds 3          # everything: days

Each contestant runs its own project's network, loss, optimizer and sampler, with its defaults
(speedrun_contestants.py). Training stops when the process has used its CPU seconds; drawing 1,000 images is measured
apart. A contestant whose learning rate falls to 0 trains once for each budget. Others train once, and are drawn on the
way.

--grid tries each contestant with every learning rate and batch of a small grid, for the shortest budget and one seed,
by 200 images. The best of them is its row "tuned", for all budgets and seeds.

Scores are taken in the hidden layer (64 features) of a classifier fitted to the 60,000 training images; a second
distance in that of a convolutional one, which sees texture and noise as well. Distances are to 5,000 test images;
"real" is 1,000 others of them. A copy is nearer to a training image than 99 % of the real ones are.

Every result is a line of --output, and what is there is not run again: an interrupted call goes on, and more seeds,
budgets or contestants add lines. The table (.md) and the curves (.png) beside it are drawn from all lines.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import RESULTS, Lines, Report, processor
from PIL import Image
from speedrun_contestants import Contestant, Entry, Plan, entries
from torch import nn

from mindspeed_mm_dit.tools.evaluate.metrics import (
    Gaussian,
    fit_gaussian,
    frechet_distance,
    precision_recall,
    squared_distances,
)

FASHION = Path("/usr/share/datasets/fashion-mnist")  # Debian's package dataset-fashion-mnist
GRID_LR, GRID_BATCH, GRID_IMAGES = (7e-4, 2e-3), (16, 32), 200
REFERENCE, REAL = 5000, "real"
HEADS = ["contestant", "learning rate", "batch", "seeds", "steps", "CPU s to draw", "Frechet", "times real",
         "convolutional", "times real", "read as asked", "precision", "recall", "copies"]  # fmt: skip


class Clothes:
    """Photographs to learn, and what ``count`` drawn ones are judged by."""

    def __init__(self, folder: Path, count: int) -> None:
        def read(name: str, skipped: int) -> np.ndarray:
            return np.frombuffer(gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())[skipped:], np.uint8)

        self.pixels, self.others = (read(f"{part}-images-idx3", 16).reshape(-1, 28, 28) for part in ("train", "t10k"))
        self.labels, self.theirs = (read(f"{part}-labels-idx1", 8).astype(np.int64) for part in ("train", "t10k"))
        self.asked, self.held = np.arange(count) % 10, slice(-count, None)

    def batches(self, size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the batches of one epoch after the other: (B, 28, 28) uint8 and (B,) int64."""
        draw = np.random.default_rng(seed)
        while True:
            order = draw.permutation(len(self.pixels))
            for own in order[: len(order) // size * size].reshape(-1, size):
                yield self.pixels[own], self.labels[own]

    @cached_property
    def classifier(self) -> Any:
        """Reads photographs; its hidden layer has the features."""
        from sklearn.neural_network import MLPClassifier

        return MLPClassifier((64,), max_iter=10, random_state=0).fit(flat(self.pixels), self.labels)

    def features(self, pixels: np.ndarray) -> np.ndarray:
        """Return (N, 64)."""
        return np.maximum(flat(pixels) @ self.classifier.coefs_[0] + self.classifier.intercepts_[0], 0)

    @cached_property
    def convolutions(self) -> nn.Sequential:
        """Another classifier's layers up to the hidden one, of 64: these see texture, too."""
        torch.manual_seed(0)
        below = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        below += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        hidden = nn.Sequential(*below, nn.Linear(64 * 7 * 7, 64), nn.ReLU())
        whole = nn.Sequential(hidden, nn.Linear(64, 10))
        optimizer = torch.optim.Adam(whole.parameters())
        for _ in range(2):
            for part in torch.randperm(len(self.pixels)).split(100):
                optimizer.zero_grad()
                found = whole(torch.from_numpy(flat(self.pixels[part.numpy()])).view(-1, 1, 28, 28))
                nn.functional.cross_entropy(found, torch.from_numpy(self.labels[part.numpy()])).backward()
                optimizer.step()
        return hidden

    def textures(self, pixels: np.ndarray) -> np.ndarray:
        """Return the convolutional features (N, 64)."""
        x = torch.from_numpy(flat(pixels)).view(-1, 1, 28, 28)
        return torch.cat([self.convolutions(part).detach() for part in x.split(500)]).numpy()

    def to_training(self, pixels: np.ndarray) -> np.ndarray:
        """Return the squared distance of each image to the nearest that was learned."""
        return squared_distances(flat(pixels), flat(self.pixels)).min(1)

    @cached_property
    def real(self) -> tuple[np.ndarray, float]:
        """Features that distances are measured to, and the squared distance below which an image is a copy."""
        return self.features(self.others[:REFERENCE]), float(
            np.quantile(self.to_training(self.others[self.held]), 0.01)
        )

    @cached_property
    def real_textures(self) -> Gaussian:
        """What convolutional features are held against."""
        return fit_gaussian(self.textures(self.others[:REFERENCE]))

    def score(self, pixels: np.ndarray, labels: np.ndarray | None) -> dict[str, float | None]:
        """Score (N, 28, 28) uint8, drawn for ``labels`` or for none."""
        seen, (reference, near) = self.features(pixels), self.real
        found = precision_recall(seen, reference)
        return {
            "frechet": round(frechet_distance(fit_gaussian(seen), fit_gaussian(reference)), 4),
            "texture": round(frechet_distance(fit_gaussian(self.textures(pixels)), self.real_textures), 4),
            "read": None if labels is None else float(np.mean(self.classifier.predict(flat(pixels)) == labels)),
            "precision": found.precision, "recall": found.recall,
            "copies": int((self.to_training(pixels) < near).sum()),
        }  # fmt: skip


def flat(pixels: np.ndarray) -> np.ndarray:
    """Return (N, 784) float32 in [0, 1]."""
    return pixels.reshape(len(pixels), -1) / np.float32(255)


def timed(call: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Return the CPU seconds that a call took, and what it returned."""
    began = time.process_time()
    result = call(*args)
    return time.process_time() - began, result


def train(
    contestant: Contestant, clothes: Clothes, plan: Plan, budgets: Sequence[float], images: int
) -> Iterator[tuple[dict[str, float], np.ndarray]]:
    """Train until each of the ``budgets`` (CPU seconds); yield what was spent, and the ``images`` drawn then."""
    stream, steps, spent = clothes.batches(plan.batch, plan.seed), 0, 0.0
    for budget in budgets:
        while spent < budget:
            spent += timed(contestant.step, *next(stream), spent)[0]
            steps += 1
        took, drawn = timed(contestant.draw, clothes.asked[:images])
        yield {"budget": budget, "steps": steps, "train_s": round(spent, 1), "draw_s": round(took, 1)}, drawn


def run(done: Lines, clothes: Clothes, entry: Entry, who: Mapping[str, Any], args: Namespace, minutes: list) -> None:
    """Train and draw for the budgets that are missing."""
    missing = [60 * own for own in minutes if not done.of(**who, budget=60 * own)]
    for budgets in [[own] for own in missing] if entry.decays else [missing] if missing else []:
        plan = Plan(who["lr"], who["batch"], who["seed"], budgets[-1])
        for spent, drawn in train(entry.build(plan), clothes, plan, budgets, who["images"]):
            scores = clothes.score(drawn, clothes.asked[: len(drawn)] if entry.knows_classes else None)
            line = {**who, **spent, **scores, "machine": processor().strip(", ")}
            done.add(**line)
            print(json.dumps(line), flush=True)
            if args.pictures:
                grid = drawn[:100].reshape(-1, 10, 28, 28).transpose(1, 2, 0, 3).reshape(280, -1)  # a row a class
                args.pictures.mkdir(parents=True, exist_ok=True)
                name = "-".join(map(str, [*who.values(), spent["budget"]])).replace("/", "-")
                Image.fromarray(grid).save(args.pictures / f"{name}.png")


def tuned(done: Lines, name: str, args: Namespace) -> tuple[float, int] | None:
    """Return the setting that is best after the shortest budget; None if the grid was not tried."""
    tried = done.of(contestant=name, seed=0, images=min(GRID_IMAGES, args.images), budget=60 * args.budgets[0])
    best = min(tried, key=lambda own: own["frechet"], default=None)
    return (best["lr"], best["batch"]) if best and len(tried) > 1 else None


def main() -> None:
    """Run what is missing, and write the table and the curves."""
    args = parse()
    known, done, clothes = entries(args.checkouts or Path()), Lines(args.output), Clothes(args.data, args.images)
    for name in args.contestants:
        if name == REAL:
            if not done.of(contestant=REAL):
                done.add(contestant=REAL, **clothes.score(clothes.others[clothes.held], clothes.theirs[clothes.held]))
            continue
        entry = known[name]
        for lr, batch in product(GRID_LR, GRID_BATCH) if args.grid else ():
            run(done, clothes, entry, who(name, lr, batch, 0, min(GRID_IMAGES, args.images)), args, args.budgets[:1])
        settings = {(entry.lr, entry.batch), tuned(done, name, args) if args.grid else None} - {None}
        for seed, setting in product(range(args.seeds), settings):
            run(done, clothes, entry, who(name, *setting, seed, args.images), args, args.budgets)
    report(done, known, args)


def who(name: str, lr: float, batch: int, seed: int, images: int) -> dict[str, Any]:
    """Return what tells one training from others."""
    return {"contestant": name, "lr": lr, "batch": batch, "seed": seed, "images": images}


def report(done: Lines, known: Mapping[str, Entry], args: Namespace) -> None:
    """Write a table for each budget, of medians over the seeds, and the curves."""
    page, curves = Report("speedrun", "The laptop speedrun: Fashion-MNIST"), {}
    page.path = args.output.with_suffix(".md")
    page.echo(f"![Distance over minutes]({page.path.stem}.png)\n")
    real = done.of(contestant=REAL)
    for minutes in args.budgets:
        rows = [[REAL, *[""] * 5, *cells(real, real)]]
        for name, entry in known.items():
            settings = {"default": (entry.lr, entry.batch), "tuned": tuned(done, name, args)}
            for which, (lr, batch) in [(key, own) for key, own in settings.items() if own]:
                own = done.of(contestant=name, lr=lr, batch=batch, images=args.images, budget=60 * minutes)
                if own and (which == "default" or (lr, batch) != settings["default"]):
                    curves.setdefault((name, which), []).append((minutes, middle(own, "frechet")))
                    spent = [f"{middle(own, key):.0f}" for key in ("steps", "draw_s")]
                    rows.append([f"{name}, {which}", f"{lr:g}", batch, len(own), *spent, *cells(own, real)])
        page.echo(f"## {minutes:g} CPU minutes\n")
        page.table(HEADS, sorted(rows, key=lambda row: float(row[6])))
    page.save()
    draw(page.path.with_suffix(".png"), curves, middle(real, "frechet"))


def middle(lines: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the median of what was measured."""
    return median(line[key] for line in lines if line[key] is not None)


def cells(lines: Sequence[Mapping[str, Any]], real: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the scores of a row."""
    distances = {key: (middle(lines, key), middle(real, key)) for key in ("frechet", "texture")}
    apart = [cell for own, least in distances.values() for cell in (f"{own:.2f}", f"{own / least:.1f}")]
    shares = ["" if lines[0][key] is None else f"{middle(lines, key):.0%}" for key in ("read", "precision", "recall")]
    return [*apart, *shares, f"{middle(lines, 'copies'):g}"]


def draw(path: Path, curves: Mapping[tuple[str, str], list[tuple[float, float]]], real: float) -> None:
    """Draw distance over minutes: tuned ones solid, defaults dashed and hollow."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(own for own, _ in curves))}
    for (name, which), points in curves.items():
        style, inside = ("o--", "white") if which == "default" else ("o-", colours[name])
        axes.plot(
            *zip(*points), style, color=colours[name], markerfacecolor=inside, label=f"{name}, {which}",
            linewidth=3 if name == "ours" else 1.5,
        )  # fmt: skip
    axes.axhline(real, color="grey", linewidth=0.8, label="real photographs")
    axes.set(xscale="log", yscale="log", xlabel="CPU minutes of training, one thread", ylabel="Frechet distance")
    axes.set_xticks(sorted({minutes for points in curves.values() for minutes, _ in points}), minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [REAL, *entries()]
    parser.add_argument(
        "--contestants", nargs="*", metavar="NAME", choices=names, help=f"of {', '.join(names)}; none: the table alone"
    )
    parser.add_argument(
        "--checkouts", type=Path, metavar="DIR", help="has DiT, of facebookresearch, and minRF, of cloneofsimo"
    )
    parser.add_argument("--data", type=Path, default=FASHION, metavar="DIR", help="the four files of Fashion-MNIST")
    parser.add_argument("--images", type=int, default=1000, help="how many to draw; distances depend on it")
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[1, 5, 20], metavar="MINUTES", help="shortest first"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--grid", action="store_true", help="choose learning rate and batch, too")
    parser.add_argument("--output", type=Path, default=RESULTS / "2026-11-26-speedrun.jsonl", help="the lines")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="keep 100 images of each result there")
    args = parser.parse_args()
    if args.contestants is None:
        args.contestants = names if args.checkouts else names[:-2]
    return args


if __name__ == "__main__":
    main()
