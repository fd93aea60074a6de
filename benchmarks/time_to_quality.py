"""Measure the CPU seconds until a small model generates images of a given score: the published DiT and later recipes.

    OMP_NUM_THREADS=1 python benchmarks/time_to_quality.py --reference DIR [--output runs.jsonl]

DIR is a checkout of facebookresearch/DiT (which needs timm), whose own network and training step are used.

All contestants have the same width, depth, heads, patches and batch. They see the same images in the same order, and
sample with the same number of network evaluations, without guidance. They use the same EMA, over about the last seventh
of the steps so far: a fixed decay, above all the published 0.9999, would still hold early weights when a fast
contestant is done.

The learning rate of each is constant and without warm-up, as published. It is the one of a small grid with the best
Frechet distance at the end of the first seed; other seeds take the same one. CPU seconds per step are measured at the
end with all contestants in turn, so other load affects all alike. A finished run is a line of --output, so an
interrupted call can continue.
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import Lines, Report, Training, interleave, reference_checkout

from mindspeed_mm_dit.optimizers.muon import MuonConfig
from mindspeed_mm_dit.tools.evaluate.demo import read_digits
from mindspeed_mm_dit.tools.evaluate.digits import real_digits
from mindspeed_mm_dit.tools.evaluate.real_images import RealImages

BATCH, AVERAGED = 64, 7  # images of a step; the average is over the last seventh of the steps
EVALUATIONS, SAMPLES_A_CLASS, TIMED = 20, 20, 15  # answers of the network for a sample; steps that are timed
SIZES = {"input_size": 8, "patch_size": 4, "hidden_size": 128, "num_layers": 4, "num_heads": 4}
THEIRS = "facebookresearch/DiT"

DDPM = {"model_id": "gaussian_diffusion"}
COSINE_V = {"noise_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction", "variance_type": "fixed_small"}
FLOW = {"model_id": "flow_matching", "timestep_sampling": "logit_normal"}
JIT = {**FLOW, "prediction_type": "data", "logit_mean": -0.8, "logit_std": 0.8}
BLOCK = {"qk_norm": True, "rms_norm": True, "swiglu": True, "rope": True}
BETA2 = {"adam_beta2": 0.95}
MUON = {"optimizer": "muon", **asdict(MuonConfig())}


class Recipe(NamedTuple):
    """What differs between contestants."""

    diffusion: Mapping[str, Any] = DDPM
    predictor: Mapping[str, Any] = {}
    flags: Mapping[str, Any] = {}


RECIPES = {
    THEIRS: Recipe(predictor={"learn_sigma": True}),
    "published DiT": Recipe(predictor={"learn_sigma": True}),
    "published DiT, patches half as wide": Recipe(predictor={"learn_sigma": True, "patch_size": 2}),
    "published + LightningDiT's network": Recipe(predictor={"learn_sigma": True, **BLOCK}, flags=BETA2),
    "cosine schedule, v": Recipe({**DDPM, **COSINE_V}),
    "flow": Recipe(FLOW),
    "flow + LightningDiT's network": Recipe(FLOW, BLOCK, BETA2),
    "LightningDiT (and its cosine loss)": Recipe({**FLOW, "cosine_loss": True}, BLOCK, BETA2),
    "JiT": Recipe(JIT, BLOCK, BETA2),
    "flow + LightningDiT's network + Muon": Recipe(FLOW, BLOCK, MUON),
    "JiT + Muon": Recipe(JIT, BLOCK, MUON),
}


@dataclass(frozen=True)
class Data:
    """Images to learn, and what drawn ones are seen through."""

    pixels: np.ndarray
    """(N, 1, 8, 8) uint8."""
    labels: np.ndarray
    real: RealImages

    def batches(self, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the batches of one epoch after the other."""
        draw = np.random.default_rng(seed)
        while True:
            order = draw.permutation(len(self.pixels))
            for own in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
                yield self.pixels[own], self.labels[own]


def digits() -> Data:
    """Return scikit-learn's digits, seen as ``mm-dit evaluate --reference digits`` sees them."""
    found = read_digits()
    return Data(np.round(found.images * (255 / 16)).astype(np.uint8)[:, None], found.labels, real_digits())


class Contestant:
    """A network in training by its recipe."""

    def __init__(self, args: Namespace, data: Data, name: str, seed: int) -> None:
        recipe = RECIPES[name]
        predictor = {"model_id": "dit", "in_channels": 1, "num_classes": 10, "learn_sigma": False, **SIZES}
        sections = {"ae": {"model_id": "pixel", "channels": 1}, "diffusion": dict(recipe.diffusion)}
        model = {**sections, "predictor": {**predictor, **recipe.predictor}}
        self.data, self.seed, self.steps, self._stream = data, seed, 0, data.batches(seed)
        self._ours = Training(model, BATCH, seed, **recipe.flags)
        self._theirs = their_step(args.reference, seed) if name == THEIRS else None

    def step(self, lr: float) -> None:
        """Take one step."""
        self.steps += 1
        pixels, labels = next(self._stream)
        if self._theirs:
            return self._theirs[0](pixels, labels, lr, min(1.0, AVERAGED / self.steps))
        self._ours.step(pixels, labels, lr, 1 / AVERAGED)

    def score(self) -> dict[str, float]:
        """Score samples of the averaged weights."""
        pipe, ema = self._ours.pipe, self._ours.ema
        if self._theirs:  # one sampler for all: their weights have our names
            pipe.predictor.load_state_dict(self._theirs[1].state_dict(), strict=False)
            ema.averages.update({n: p.detach() for n, p in pipe.predictor.named_parameters()})
        flow = pipe.config.diffusion.model_id == "flow_matching"
        with ema.swapped_in():
            drawn = pipe.sample(
                num=SAMPLES_A_CLASS, sampler="heun" if flow else "dpm++", steps=EVALUATIONS // (1 + flow),
                guidance=1.0, channels="all", seed=self.seed, batch_size=200,
            )  # fmt: skip
        assert drawn.labels is not None
        found = self.data.real.score(drawn.arrays.reshape(len(drawn), -1) * (16 / 255), drawn.labels)
        return {"frechet": found.frechet, "accuracy": float(found.accuracy or 0), "variety": found.variety}


def their_step(folder: str, seed: int) -> tuple[Callable[..., None], Any]:
    """Return a step of the checkout's train.py, its network and diffusion, and its average."""
    with reference_checkout(folder):
        from diffusion import create_diffusion
        from models import DiT
    torch.manual_seed(seed)
    sizes = {"depth" if name == "num_layers" else name: size for name, size in SIZES.items()}
    model, diffusion = DiT(in_channels=1, num_classes=10, learn_sigma=True, **sizes), create_diffusion("")
    average, optimizer = deepcopy(model).requires_grad_(False), torch.optim.AdamW(model.parameters(), weight_decay=0)

    def step(pixels: np.ndarray, labels: np.ndarray, lr: float, share: float) -> None:
        images, t = torch.from_numpy(pixels).float() / 127.5 - 1, torch.randint(0, 1000, (len(pixels),))
        loss = diffusion.training_losses(model, images, t, {"y": torch.from_numpy(labels)})["loss"].mean()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters()):
                mean.lerp_(weight, share)

    return step, average


def main() -> None:
    """Run what is missing, and write the results."""
    args = parse()
    data, done = digits(), Lines(Path(args.output))
    names = [name for name in args.recipes if name != THEIRS or args.reference]
    for name in names:
        for lr in args.lr:
            run(args, data, done, name, lr, 0)
        for seed in range(1, args.seeds):
            run(args, data, done, name, best(done, name), seed)
    if args.against in names:
        write(args, data, done, names)


def run(args: Namespace, data: Data, done: Lines, name: str, lr: float, seed: int) -> None:
    """Train and score at each mark, unless it is done."""
    if done.of(recipe=name, lr=lr, seed=seed):
        return
    contestant, scores = Contestant(args, data, name, seed), []
    for mark in args.steps:
        while contestant.steps < mark:
            contestant.step(lr)
        scores.append({"step": mark, **contestant.score()})
    done.add(recipe=name, lr=lr, seed=seed, scores=scores)


def best(done: Lines, name: str) -> float:
    """Return the learning rate with the best end of the first seed."""
    return min(done.of(recipe=name, seed=0), key=lambda own: own["scores"][-1]["frechet"])["lr"]


def write(args: Namespace, data: Data, done: Lines, names: list[str]) -> None:
    """Measure the seconds of a step, and write the table and the picture of the curves."""
    report = Report("time_to_quality", "CPU seconds to quality")
    contestants = {name: Contestant(args, data, name, 0) for name in names}
    steps = {name: lambda own=own: own.step(1e-3) for name, own in contestants.items()}
    seconds = {name: statistics.median(own) for name, own in interleave(steps, TIMED, clock="cpu").items()}
    ends = {name: chosen(done, name)[-1] for name in names}
    goal = ends[args.against]["frechet"]
    took = {name: first(chosen(done, name), goal) for name in names}
    published = took[args.against] * seconds[args.against]
    rows = []
    for name in sorted(names, key=lambda own: took[own] * seconds[own]):
        lr, end, whole = best(done, name), ends[name], took[name] * seconds[name]
        rows.append([name, len(done.of(recipe=name, lr=lr)), lr, f"{seconds[name]:.3f}", end["step"],
                     f"{end['frechet']:.1f}", f"{end['accuracy']:.1%}", f"{end['variety']:.0%}",
                     f"{took[name]:.0f}", f"{whole:.0f}", f"{published / whole:.2f}"])  # fmt: skip
    heads = ["recipe", "seeds", "learning rate", "CPU s a step", "steps", "Frechet then", "read as asked", "variety"]
    report.table([*heads, f"steps to {goal:.1f}", f"CPU s to {goal:.1f}", "times as fast"], rows)
    report.echo(f"Medians over seeds; {goal:.1f} is where {args.against} ends.\n")
    report.save()
    draw(report.path.with_suffix(".png"), {name: chosen(done, name) for name in names}, seconds, goal)


def chosen(done: Lines, name: str) -> list[dict[str, float]]:
    """Return the median over seeds of each score at each mark, at the learning rate that was chosen."""
    own = [run["scores"] for run in done.of(recipe=name, lr=best(done, name))]
    return [{key: statistics.median(score[key] for score in at) for key in at[0]} for at in zip(*own)]


def first(scores: list[dict[str, float]], goal: float) -> float:
    """Return the step at which the Frechet distance falls to ``goal``, on straight lines of its logarithm."""
    for last, this in zip([scores[0], *scores], scores):
        if this["frechet"] <= goal:
            high, low, level = np.log([last["frechet"], this["frechet"], goal])
            return float(this["step"] - (this["step"] - last["step"]) * (level - low) / (high - low or 1))
    return float("inf")


def draw(path: Path, curves: Mapping[str, list[dict[str, float]]], seconds: Mapping[str, float], goal: float) -> None:
    """Draw score over CPU seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for side, key, label in zip(axes, ("frechet", "accuracy"), ("Frechet distance", "share read as asked")):
        for number, (name, scores) in enumerate(curves.items()):
            x, y = [own["step"] * seconds[name] for own in scores], [own[key] for own in scores]
            side.plot(x, y, label=name, color=f"C{number % 10}", linestyle="--" if number > 9 else "-", marker=".")
        side.set(xlabel="CPU seconds of training", ylabel=label)
    axes[0].set_yscale("log")
    axes[0].axhline(goal, color="grey", linewidth=0.8)
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def parse() -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", metavar="DIR", help="checkout of facebookresearch/DiT; without it, ours alone")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="NAME")
    parser.add_argument("--against", default=THEIRS, choices=list(RECIPES), help="whose end is the goal")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[75, 100, 125, 150, 200, 300, 400, 600], help="after each is scored"
    )
    parser.add_argument("--output", default="time_to_quality.jsonl", help="finished runs; those in it are not repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
