"""``mm-dit train``."""

from __future__ import annotations

import argparse

from mindspeed_mm_dit.configs.arguments import embedded_configs
from mindspeed_mm_dit.training.launch import train

DESCRIPTION = """\
Train the model that a config folder describes. Run the same command again to resume from the last checkpoint.

  mm-dit train digits                        a small DiT on handwritten digits, which come with the package
  mm-dit train my_config --train-iters 500   a folder that mm-dit init wrote; flags override its train.args
  mm-dit train my_config --help              every flag
  NPUS_PER_NODE=2 mm-dit train digits --use-torch-fsdp2

A run writes its outputs below the working directory. These environment variables set how it is started:

  AI_FRAMEWORK=NAME       pytorch (default, launched by torchrun) or mindspore (launched by msrun)
  NPUS_PER_NODE=N         processes on this node (default: one per accelerator; on a CPU 1, or 2 with mindspore)
  CUDA_VISIBLE_DEVICES    which accelerators, such as 0,1 (of NVIDIA; on Ascend ASCEND_RT_VISIBLE_DEVICES)
  NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several nodes; run the command on each
  MM_TOOL=FILE            tools.json of MindSpeed-MM, required by --host mindspeed-mm
  OMP_NUM_THREADS=N       threads of each process (default: the processes share the cores)
  OMP_WAIT_POLICY=KIND    passive: waiting threads sleep; active: they spin (default: they sleep beside other work)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help=f"folder with model.json, data.json and train.args, or an embedded one: {', '.join(embedded_configs())}",
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="flags of the run, after CONFIG")


def run(args: argparse.Namespace) -> int:
    """Start the run and wait for it."""
    return train(args.config, args.flags)
