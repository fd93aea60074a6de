"""What --dry-run says: the run that every check has let pass, and that is not begun."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.training.batches import image_indices


def plan_of_run(args: Namespace, world_size: int, iteration: int | None, consumed_samples: int = 0) -> str:
    """Return the lines that describe a run; ``iteration``: where it starts, None where that is not known yet.

    ``args``: its flags with ``args.mm``, of which one batch size and --train-iters may be None.
    """
    lines = ["dry run: every check passed; no model is built, and nothing is trained or saved", _model(args)]
    batch = args.global_batch_size or args.micro_batch_size * world_size
    if args.train_iters is not None:
        lines.append(_length(args, batch, iteration, consumed_samples))
    every = f"every {args.save_interval} steps and " if args.save_interval else ""
    lines.append(f"  saved     {f'in {args.save}, {every}at the end' if args.save else 'nothing, without --save'}")
    return "\n".join(lines)


def _model(args: Namespace) -> str:
    model = args.mm.model
    channels = {1: "grey", 3: "RGB"}[model.ae.channels]
    return (
        f"  model     {model.predictor.model_id}, {model.predictor.parameters().num_elements():,} parameters, on "
        f"{model.image_size} x {model.image_size} {channels} images, ae {model.ae.model_id}, diffusion "
        f"{model.diffusion.model_id}"
    )


def _length(args: Namespace, batch: int, iteration: int | None, consumed_samples: int) -> str:
    steps = max(0, args.train_iters - (iteration or 0))
    train, _ = image_indices(args.mm, args.seed)
    start = "" if not iteration else f", from iteration {iteration} ({consumed_samples:,} samples) on"
    flop = train_flop(args.mm.model.predictor) * steps * batch
    return (
        f"  length    {steps:,} steps of {batch:,} samples up to iteration {args.train_iters:,}{start}: each of "
        f"{len(train):,} images {steps * batch / len(train):,.1f} times, {flop / 1e12:,.4g} TFLOP"
    )
