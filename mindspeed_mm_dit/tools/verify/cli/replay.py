"""``mm-dit replay``: recompute one step of a run, and find what in it was not finite."""

from __future__ import annotations

import argparse
from dataclasses import replace

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.tools.verify.past_run import PastRun
from mindspeed_mm_dit.training.flags import without_outputs

DESCRIPTION = """Find out why a loss became NaN or infinite: recompute one step of a run from the checkpoint before it.
All random numbers are functions of the sample index, so on the same number of ranks the loss is the one that was
printed, digit for digit. Prints the first tensor that is not finite and its module, the samples of the batch, and the
largest activations of each block. Nothing is saved.

  mm-dit replay --checkpoint outputs/digits/checkpoints                    the step that was not finite
  mm-dit replay --checkpoint outputs/digits/checkpoints --iteration 650    any other
  torchrun --nproc_per_node 2 -m mindspeed_mm_dit.cli.main -- replay ...   of a run on two ranks

The flags are those of the run, saved with its checkpoints. Pass flags that differ now, such as a path that has moved,
after "--":

  mm-dit replay --checkpoint DIR --iteration 650 -- --mm-data elsewhere/data.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="folder of --save, or a checkpoint in it")
    parser.add_argument("--iteration", type=int, metavar="N", help="step to replay (default: the one not finite)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of the run that differ now")


def run(args: argparse.Namespace) -> int:
    """Replay a step; 0 if it is finite, 1 if not."""
    past = PastRun.open("--checkpoint", args.checkpoint)
    iteration = args.iteration if args.iteration is not None else past.left.get("iteration")
    if iteration is None:
        raise ConfigError(
            f"--iteration is needed, because {past.root} has no record of a step that was not finite. Name the step to "
            "recompute."
        )
    checkpoint = past.before(iteration)
    flags = without_outputs(past.flags(checkpoint, args.flags))
    if iteration > flags.train_iters:
        raise ConfigError(f"--iteration = {iteration} is more than the {flags.train_iters} steps of the run.")
    if flags.ai_framework != "pytorch":
        raise PlatformError(
            f"--ai-framework = {flags.ai_framework} cannot be replayed, only pytorch. Convert the checkpoint by mm-dit "
            "convert CHECKPOINT NEW_FOLDER --to pytorch, then pass --checkpoint NEW_FOLDER -- --ai-framework pytorch."
        )

    activate(flags.ai_framework)
    from mindspeed_mm_dit.tools.verify.recompute import replay

    whole = replace(flags, torch_compile=False)  # compiled modules have no outputs that hooks could observe
    return 0 if replay(whole, checkpoint, iteration) else 1
