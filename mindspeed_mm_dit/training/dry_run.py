"""What --dry-run says: the run that every check has let pass, and that is not begun."""

from __future__ import annotations

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.models.data import dearest
from mindspeed_mm_dit.training.data_set import open_data_set
from mindspeed_mm_dit.training.rehearsal import rehearse


def plan_of_run(args: RunConfig, world_size: int, iteration: int | None, consumed_samples: int = 0) -> str:
    """Return the lines that describe a run; ``iteration``: where it starts, None where that is not known yet.

    ``args``: its flags with ``args.mm``, of which one batch size and --train-iters may be None.
    Raises ConfigError where the first step could not be taken.
    """
    rehearse(
        dearest(args.mm.model, args.mm.data.dataset_param),
        args.micro_batch_size or -(-args.global_batch_size // world_size),
    )
    lines = ["dry run: every check passed; no model is built, and nothing is trained or saved", _model(args)]
    batch = args.global_batch_size or args.micro_batch_size * world_size
    if args.train_iters is not None:
        lines.append(_length(args, batch, iteration, consumed_samples))
    every = f"every {args.save_interval} steps and " if args.save_interval else ""
    lines.append(f"  saved     {f'in {args.save}, {every}at the end' if args.save else 'nothing, without --save'}")
    return "\n".join(lines)


def _model(args: RunConfig) -> str:
    model = args.mm.model
    channels = {1: "grey", 3: "RGB"}[model.ae.channels]
    size = " x ".join(map(str, model.sample_size))
    return (
        f"  model     {model.predictor.model_id}, {model.parameters().num_elements():,} parameters, on "
        f"{size} {channels} {'clips' if len(model.sample_size) == 3 else 'images'}, ae {model.ae.model_id}, diffusion "
        f"{model.diffusion.model_id}"
    )


def _length(args: RunConfig, batch: int, iteration: int | None, consumed_samples: int) -> str:
    steps = max(0, args.train_iters - (iteration or 0))
    data = open_data_set(args.mm, args.seed)
    start = "" if not iteration else f", from iteration {iteration} ({consumed_samples:,} samples) on"
    flop = data.flop_of_a_sample() * steps * batch
    return (
        f"  length    {steps:,} steps of {batch:,} samples up to iteration {args.train_iters:,}{start}: each of "
        f"{data.num_train:,} {data.noun}s {steps * batch / data.num_train:,.1f} times, {flop / 1e12:,.4g} TFLOP"
    )
