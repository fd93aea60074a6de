"""``mm-dit prove``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_mm_dit.configs.arguments import config_folder
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.configs.run import check_output_file
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.hosts.registry import host_by_name
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.verify.page import proof_lines, write_proof, write_proof_of_run
from mindspeed_mm_dit.tools.verify.past_run import PublishedRun, write_card
from mindspeed_mm_dit.tools.verify.processes import interpreters
from mindspeed_mm_dit.tools.verify.proof import Config, open_config, prove
from mindspeed_mm_dit.tools.verify.prove import LAYOUTS, Layout, chosen
from mindspeed_mm_dit.training.flags import parse, without_outputs

MAX_STEPS = 1000
"""Maximum number of steps; one step shows almost every fault."""

DESCRIPTION = """\
Is my training step right, in every layout I am going to pay for?

  mm-dit prove digits
  mm-dit prove configs/mine --layouts 'FSDP2*' hybrid --output proof.html
  mm-dit prove configs/mine --checkpoint runs/mine/checkpoints --steps 5
  mm-dit prove --run runs/mine/checkpoints --at 20,400 --card run_card.md
  mm-dit prove --run run_card.md -- --mm-data elsewhere/data.json

Computes one optimizer step on one rank in float64 with your config folder and data: the reference. Then computes the
same step in every layout that this machine can run. Losses, every gradient, the gradient norm, and every weight and its
EMA after the step must equal the reference up to rounding, which is measured. If a layout is wrong, prints its first
wrong module.
The exit code is 1 if a layout is wrong, 2 for a mistake in the input.

With --run, recomputes steps of a published run on this machine, and compares loss and gradient norm with its log."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add = parser.add_argument
    words = (
        "folder with model.json, data.json and train.args, or an embedded one; "
        "with --run, after --: flags of the run that differ here"
    )
    add("config", nargs="*", metavar="CONFIG", help=words)
    add("--layouts", nargs="+", default=[], metavar="NAME", help="check only these layouts; * matches anything")
    add("--list", action="store_true", help="list the layouts, and exit")
    add("--checkpoint", metavar="PATH", help="weights to start from, in any format (default: random ones)")
    words = "use the whole model and batch (default: a narrower copy of the model, 16 samples)"
    add("--full", action="store_true", help=words)
    add("--steps", type=int, default=1, metavar="N", help="steps to compute (default 1)")
    add("--output", default="proof.html", metavar="HTML", help="page to write, with a JSON next to it")
    add("--run", dest="past", metavar="PATH", help="a folder of --save, or a run card")
    words = "with --run: logged iterations to recompute (default: the first after each checkpoint)"
    add("--at", type=_iterations, default=[], metavar="N,N", help=words)
    add("--log", metavar="LOG", help="with --run: a log or TensorBoard folder (default: that of the run)")
    add("--card", metavar="MD", help="with --run: write a run card, to publish with the weights")
    add("--mindspore-python", metavar="PY", help="interpreter with MindSpore (default: this one, .venv-mindspore)")


def run(args: argparse.Namespace) -> int:
    """Verify the layouts; return 0 if all that were verified are right, 1 if one is wrong."""
    layouts = chosen(args.layouts)
    if args.list:
        echo("\n".join(map(str, layouts)))
        return 0
    check_arguments(args)
    if args.past:
        return _run_again(args)

    folder = Path(tempfile.mkdtemp(prefix="mm-dit-prove-"))
    try:
        config = open_config(config_folder(args.config[0]), folder, args.checkpoint, args.full, args.steps)
        config = _preflighted(config)
        layouts = chosen(args.layouts, _available_layouts())
        verdicts = prove(
            config, layouts, {**interpreters(None, args.mindspore_python), **_missing_hosts(layouts)}, _echo
        )
        write_proof(Path(args.output), config, verdicts)
    finally:
        shutil.rmtree(folder)
    echo(proof_lines(verdicts))
    _log_page(Path(args.output))
    return 1 if any(verdict.word == "FAIL" for verdict in verdicts) else 0


def _run_again(args: argparse.Namespace) -> int:
    """Compare steps of a published run with its log; return 0 if all agree up to rounding, 1 if one does not."""
    card, page = Path(args.card).resolve() if args.card else None, Path(args.output).resolve()
    run = PublishedRun.open(args.past, args.log, args.config)
    activate(run.flags.ai_framework)
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.tools.verify.recompute import differing_versions, recompute, run_facts_of

    findings = recompute(run, args.at)
    if runtime.rank() == 0:
        about = run_facts_of(run)
        write_proof_of_run(page, run, findings, about, differing_versions(run.facts, findings))
        _log_page(page)
        if card:
            write_card(card, run, findings, about)
            echo(f"card: {card}")
    runtime.shutdown()
    return 0 if all(finding.good for finding in findings) else 1


def _preflighted(config: Config) -> Config:
    """Check the config as a run would, before time is spent; return it with the digest of its data."""
    from mindspeed_mm_dit.hosts.preflight import preflight

    activate("pytorch")  # which computes the float64 reference
    mm = preflight(without_outputs(parse(list(config.task(Layout("float64 reference"), "reference").flags)))).mm
    return replace(config, about={**config.about, "data": mm.data_digest})


def _available_layouts() -> list[Layout]:
    """Return the layouts that differ from the reference on this machine."""
    from mindspeed_mm_dit.framework import runtime

    return [layout for layout in LAYOUTS if not (layout.cpu_reference and runtime.device_type() == "cpu")]


def _missing_hosts(layouts: Sequence[Layout]) -> dict[str, UserError]:
    """Return the hosts of ``layouts`` that are not installed, each with its error."""
    missing = {}
    for host in {layout.host for layout in layouts}:
        try:
            host_by_name(host).needs(["--host", host])
        except UserError as error:
            missing[host] = error
    return missing


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse flags that cannot work, before time is spent."""
    if Path(args.output).suffix != ".html":
        raise ConfigError(f"--output = {args.output} must end in .html.")
    check_output_file("--output", args.output)
    if args.card:
        check_output_file("--card", args.card)
    if args.past:
        return
    if len(args.config) != 1:
        raise ConfigError("mm-dit prove takes one config folder (CONFIG), or a run by --run. Name one of them.")
    if args.at or args.log or args.card:
        raise ConfigError("--at, --log and --card need a run. Name it by --run.")
    config_folder(args.config[0])
    check_between(
        "--steps", args.steps, 1, MAX_STEPS, "Every layout computes each step, and so does the float64 reference."
    )


def _iterations(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected a list of iterations such as 20,400, not {text}")
    return [int(part) for part in text.split(",")]


def _log_page(path: Path) -> None:
    echo(f"page: {path}, the same as JSON: {path.with_suffix('.json')}")


def _echo(text: str) -> None:
    echo(text, file=sys.stderr)
