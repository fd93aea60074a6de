"""A command as another package brings it: ``mm-dit count`` counts the files of a folder."""

import os

from mindspeed_mm_dit.cli.commands import Command
from mindspeed_mm_dit.terminal import echo

DESCRIPTION = "Count the files of a folder."
COUNT = Command("count the files of a folder", __name__)


def add_arguments(parser):
    parser.add_argument("folder")


def run(args):
    echo(len(os.listdir(args.folder)))
    return 0
