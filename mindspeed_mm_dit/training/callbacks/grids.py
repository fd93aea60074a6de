"""--sample-interval: sample grids while a run trains, always of the same noise and classes, with the EMA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.limits import MAX_GUIDANCE, check_between
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.configs.source import format_sizes
from mindspeed_mm_dit.errors import ConfigError, ConvergenceError, wrap_step_errors
from mindspeed_mm_dit.models.data import with_size
from mindspeed_mm_dit.models.registry import check_encoders
from mindspeed_mm_dit.objectives.registry import find_sampler, objective_of
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.generate import generate, with_defaults
from mindspeed_mm_dit.sampling.outputs import draw_sizes
from mindspeed_mm_dit.sampling.pictures import captioned
from mindspeed_mm_dit.sampling.request import SampleRequest
from mindspeed_mm_dit.terminal import doing
from mindspeed_mm_dit.training.callbacks.registry import Callback, CallbackSpec, Run, Step
from mindspeed_mm_dit.training.contract import Engine
from mindspeed_mm_dit.training.log import RunLog
from mindspeed_mm_dit.training.loggers.registry import requested_loggers
from mindspeed_mm_dit.training.report import prompts_to_sample

STEPS = 20
SAMPLES_PER_CLASS = 4


class SampleGrids(Callback):
    """Generates a sample grid, saved as ``samples/iter_0000500.png`` next to the --save folder, and in TensorBoard.

    The noise of an image depends only on the seed and its number, so the random numbers of the run stay the same, and
    pictures of one run can be compared.
    """

    def __init__(self, args: RunConfig, log: RunLog) -> None:
        self._classes, self._log = args.mm.classes, log
        self._folder = folder_of(args)
        self._request = request_of(args)
        config: ModelConfig = args.mm.model
        data, each = args.mm.data_set, SAMPLES_PER_CLASS if config.predictor.conditions.label else 1
        self._conditions = SampleConditions(data.examples(prompts_to_sample(args))).repeat(each)
        self._configs = [with_size(config, shape) for shape in data.sampled_shapes()] or [config]

    def after_step(self, run: Run, step: Step) -> None:
        """Generate a grid if it is due."""
        iteration = run.progress.iteration
        if run.is_due(run.args.sample_interval):
            run.flush()
            with wrap_step_errors(f"The samples at iteration {iteration}"), doing("drawing samples", run.log.echo):
                self.draw(run.engine, iteration)

    def draw(self, engine: Engine, iteration: int) -> None:
        """Generate the grid of ``iteration`` on the rank that logs; every rank must call this."""
        try:
            with engine.ema_weights(self._log.prints) as model:
                if model is None:
                    return
                titles = self._conditions.titles(self._classes)
                samples = [generate(model, config, self._conditions, self._request) for config in self._configs]
                sizes = format_sizes([config.sample_size for config in self._configs])
                picture = captioned(draw_sizes(samples, titles), f"step {iteration:,}: {self._request.words}, {sizes}")
        except ConvergenceError:
            self._log.echo(f"samples at iteration {iteration}: not finite, so no grid is written")
            return
        if self._log.prints:
            self._keep(picture, iteration)

    def _keep(self, grid: Image.Image, iteration: int) -> None:
        self._log.picture(iteration, "samples", np.asarray(grid))
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            grid.save(self._folder / f"iter_{iteration:07d}.png")
        except OSError as error:  # with a full disk the grid is lost, and the run goes on
            self._log.echo(f"warning: --sample-interval: {self._folder} cannot be written: {error}; the run goes on")


def folder_of(args: RunConfig) -> Path | None:
    """Return the folder for the pictures of a run; None without --save."""
    return Path(args.save).parent / "samples" if args.save else None


def request_of(args: RunConfig) -> SampleRequest:
    """Return how the samples of a run's grids are generated."""
    model = args.mm.model
    has_guidance = model.predictor.conditions.has_unconditional
    request = SampleRequest(
        sampler=objective_of(model.diffusion).quick_sampler,
        steps=STEPS,
        guidance=model.predictor.cfg_scale(args.report_cfg_scale) if has_guidance else 1.0,
        seed=args.seed,
        batch_size=args.micro_batch_size,  # what fits with a gradient fits without, even with guidance
    )
    return with_defaults(request, model)


def check_grids(args: RunConfig, world_size: int) -> None:
    """Raise a UserError for --sample-interval if there is no output for the grids, or they cannot be sampled."""
    if not args.sample_interval:
        return
    model: ModelConfig = args.mm.model
    what = f"--sample-interval = {args.sample_interval}"
    if not args.save and not requested_loggers(args):
        raise ConfigError(f"{what} has nowhere to keep the images. Add --save DIR or --tensorboard-dir DIR.")
    check_between("--report-cfg-scale", args.report_cfg_scale, 0.0, MAX_GUIDANCE)
    name = objective_of(model.diffusion).quick_sampler
    sampler = find_sampler(model.diffusion, name)
    try:
        sampler.check(model.diffusion, STEPS, sampler.options())
    except ConfigError as error:
        problem = str(error).partition(". ")[0].rstrip(".")
        raise ConfigError(f"{what} takes {STEPS} steps of {name}, but {problem}. Leave the flag out.") from None
    check_encoders(model, teachers=False)  # even with cached latents, samples are decoded


def _writes(args: RunConfig) -> tuple[str, Path] | None:
    folder = folder_of(args)
    return ("--sample-interval", folder) if args.sample_interval and folder is not None else None


def _open(run: Run) -> Callback | None:
    return SampleGrids(run.args, run.log) if run.args.sample_interval else None


KIND = CallbackSpec("grids", _open, check_grids, _writes)
