"""One side of ``mm-dit compare``: a process that activates one framework and writes what it computes.

    python -m mindspeed_mm_dit.verify.worker JOB.json ...

Every called part of the predictor is watched from outside: its ``forward`` (MindSpore: ``construct``) is wrapped
for one pass, which notes the part's inputs and output. Of a list such as ``blocks``, each item and its direct parts
are watched, so a part is small enough to name and the arrays fit on a disk.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.data.draws import Stream, normals, philox
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate

Arrays = dict[str, np.ndarray]

WATCHED = re.compile(r"|\w+|\w+\.\d+|\w+\.\d+\.\w+")
"""Names of the parts that are watched; the empty one is the predictor itself."""
NUDGE = 0.05
"""Standard deviation of what replaces zero-initialised weights, which would hide every error behind them."""


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do; it travels as JSON."""

    framework: str
    """Framework to activate."""
    model: str
    """Path of model.json."""
    weights: str
    """Safetensors file of the weights both sides use: read if it is there, else made and written."""
    inputs: str
    """Path of the .npz with latents, labels, timesteps and noise."""
    output: str
    """Path of the .npz to write."""
    seed: int
    """Decides drawn weights."""
    checkpoint: str | None = None
    """Where the weights come from; None: they are drawn from ``seed``."""


def main(argv: list[str]) -> int:
    """Do the jobs in the files ``argv``, all of one framework; return 0, or 2 after a mistake in the input."""
    try:
        for path in argv:
            job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
            activate(job.framework)
            measure(job)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def measure(job: Job) -> None:
    """Compute the quantities of the table on the job's inputs, and write them."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.registry import PREDICTOR_MODEL_MAPPINGS
    from mindspeed_mm_dit.objectives.registry import objective_of

    config = load_model_config(job.model)
    predictor = PREDICTOR_MODEL_MAPPINGS[config.predictor.model_id](config.predictor)
    process = runtime.to_runtime_device(objective_of(config.diffusion).build(config.diffusion))
    _load_weights(predictor, config, job)
    predictor = runtime.to_runtime_device(predictor)
    with np.load(job.inputs) as file:
        watched = WatchedStep(predictor, process, runtime.to_device(dict(file)))
    np.savez(job.output, facts=np.array(json.dumps(facts())), **watched.computed)


def draw_inputs(config: ModelConfig, seed: int, count: int) -> Arrays:
    """Draw ``count`` samples: latents, noise, times from data to noise, and labels.

    The last label is the null class. ``count`` is at least 2.
    """
    from mindspeed_mm_dit.objectives.registry import objective_of

    numbers = np.arange(count)
    noise = normals(seed, Stream.NOISE, numbers, config.latent_shape)
    return {
        "latents": normals(seed, Stream.SAMPLE_START, numbers, config.latent_shape),
        **objective_of(config.diffusion).draws_at(config.diffusion, numbers / (count - 1), noise),
        **config.predictor.conditions.examples(count),
    }


class WatchedStep:
    """A forward pass of a model and the gradients of its mean loss; noted of each part, what goes in and comes out."""

    def __init__(self, predictor: Any, process: Any, given: Mapping[str, Any]) -> None:
        from mindspeed_mm_dit.framework import nn, ops
        from mindspeed_mm_dit.verify.step import Step

        self.computed: Arrays = {}
        """output/PART in the order in which they finish, in/PART/0, in/PART/1, ..., and gradient/PARAMETER."""
        self._predictor, self._process, self._given = predictor, process, given
        parts = [("diffusion.noised", process, "noised"), ("diffusion.loss", process, "loss")]
        parts += [
            (f"predictor.{name}".rstrip("."), part, nn.CALLED)
            for name, part in predictor.named_modules()
            if WATCHED.fullmatch(name)
        ]
        with ops.no_grad(), _watched(parts, self._note):
            self._losses(predictor)
        gradients = Step(lambda: predictor, self._losses).gradients
        self.computed |= {f"gradient/{name}": gradient for name, gradient in gradients.items()}

    def _losses(self, predictor: Any) -> Any:
        """Return the loss of each sample, as models/composite.py does from latents."""
        from mindspeed_mm_dit.framework import ops

        process, given = self._process, self._given
        latents, draws = given["latents"], [given[name] for name in process.draw_names]
        noised = process.noised(latents, *draws)
        condition = [given[name] for name in given if name not in ("latents", *process.draw_names)]
        output = ops.to_float32(predictor(noised, draws[0], *condition))
        return process.loss(output, latents, noised, *draws)

    def _note(self, part: str, inputs: tuple[Any, ...], output: Any) -> None:
        from mindspeed_mm_dit.framework import ops

        self.computed[f"output/{part}"] = ops.numpy(output)
        self.computed |= {f"in/{part}/{number}": ops.numpy(x) for number, x in enumerate(inputs) if x is not None}


@contextmanager
def _watched(parts: list[tuple[str, Any, str]], note: Callable[..., None]) -> Iterator[None]:
    """While this lasts, tell ``note`` of every call of the parts (name, object, name of its method)."""
    originals = [getattr(part, method) for _, part, method in parts]
    for (name, part, method), original in zip(parts, originals):
        setattr(part, method, _noting(name, original, note))
    try:
        yield
    finally:
        for (_, part, method), original in zip(parts, originals):
            setattr(part, method, original)


def _noting(name: str, original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        output = original(*inputs)
        note(name, inputs, output)
        return output

    return call


# --- weights ---------------------------------------------------------------------------------------------


def _load_weights(predictor: Any, config: ModelConfig, job: Job) -> None:
    """Give the predictor the weights of the job, and leave them in its file for the other side."""
    from safetensors.numpy import load_file, save_file

    from mindspeed_mm_dit.checkpoint.fitting import check_names
    from mindspeed_mm_dit.checkpoint.store import find_checkpoint
    from mindspeed_mm_dit.checkpoint.weights import read_weights
    from mindspeed_mm_dit.framework import ops, runtime

    if Path(job.weights).is_file():
        runtime.load_arrays(predictor, load_file(job.weights))
        return
    if job.checkpoint is None:
        weights = drawn_weights(config, job.seed)
    else:
        weights = read_weights(find_checkpoint(job.checkpoint))
        found = {name: array.shape for name, array in weights.items()}
        check_names(runtime.shapes(predictor), found, f"--checkpoint = {job.checkpoint}")
    runtime.load_arrays(predictor, weights)
    save_file({name: np.ascontiguousarray(ops.numpy(p)) for name, p in predictor.named_parameters()}, job.weights)


def drawn_weights(config: ModelConfig, seed: int) -> Arrays:
    """Return the weights that a run begins with, where those that begin as zero are drawn too."""
    from mindspeed_mm_dit.models.init import initial_weights

    drawn = initial_weights(config.predictor.parameters(), seed)
    return {name: nudged(name, value, seed) for name, value in drawn.items()}


def nudged(name: str, value: np.ndarray, seed: int) -> np.ndarray:
    """Return what a parameter begins as; what would begin as zero is drawn, for zeros hide errors behind them."""
    if value.any():
        return value
    draw = philox((seed, zlib.crc32(name.encode())))
    return draw.standard_normal(value.shape, np.float32) * np.float32(NUDGE)


def facts() -> dict[str, str]:
    """Return the versions and the device of this process."""
    from mindspeed_mm_dit import __version__
    from mindspeed_mm_dit.framework import runtime

    return {
        "mindspeed_mm_dit": __version__, **runtime.versions(), "python": platform.python_version(),
        "device": runtime.device_name(), "system": platform.platform(),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
