"""``mm-dit plan``."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from mindspeed_mm_dit.configs.arguments import FLAGS_FILE, Parser, read_train_args
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.diffusion import WanFlowConfig
from mindspeed_mm_dit.configs.flag import rows_of, std
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config
from mindspeed_mm_dit.configs.predictor import count
from mindspeed_mm_dit.configs.run import RunConfig, check_output_file, optimizer_settings, rows
from mindspeed_mm_dit.configs.tuning import FineTuning, tuning_from_flags
from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.hosts.registry import host_by_name
from mindspeed_mm_dit.models.data import check_sizes, most_expensive_shape, with_budget
from mindspeed_mm_dit.models.meta import multiply_adds, parameters_of, with_tuning
from mindspeed_mm_dit.optimizers.registry import check_flags
from mindspeed_mm_dit.planning import (
    CARDS,
    PEAKS,
    Placement,
    check_offloaded_blocks,
    memory,
    optimizer_note,
    smallest_card,
    train_flop,
)
from mindspeed_mm_dit.terminal import echo
from mindspeed_mm_dit.tools.planning.recommend import (
    GIB,
    Links,
    Recommendation,
    Request,
    fitting,
    fsdp2_yaml,
    host_traffic,
    recommend,
    step_time,
    traffic,
)

DESCRIPTION = """\
Estimate what a run will need before you start it: parameters, arithmetic, memory by part, the largest micro-batch,
bytes sent, and time, for PyTorch. The numbers come from formulas: no device and no framework is needed.

  mm-dit plan --model examples/dit/imagenet256/model.json --world-size 8 --device-memory-gib 80
  mm-dit plan --model model.json --world-size 64 --device-memory-gib 64 --link-gbps 200 --peak-tflops 376 \\
      --write-fsdp2 fsdp2.yaml
  mm-dit plan --model wan14b.json --world-size 8 --device-memory-gib 64 --lora-target-modules to_q to_k to_v to_out.0
  mm-dit plan --write-native examples/dit/imagenet256 --world-size 8"""

MAX_ARGUMENTS = 10**9
"""Upper limit of every quantity in a plan: devices, images, GiB, gigabits and TFLOP a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    add = parser.add_argument
    add("--model", metavar="JSON", help="model.json; needed for a plan")
    add("--world-size", type=int, default=1, metavar="N", help="devices (default 1)")
    add("--device-memory-gib", type=float, default=80.0, metavar="M", help="GiB of each (default 80)")
    add("--micro-batch-size", type=int, metavar="N", help="images per micro-batch (default: the largest that fits)")
    add("--node-size", type=int, default=8, metavar="N", help="devices per node (default 8)")
    other_actions = set(parser._actions)
    add_run_flags(parser)
    for action in set(parser._actions) - other_actions:
        action.default = argparse.SUPPRESS  # (take_from_config fills in missing ones)
    add("--data", metavar="JSON", help="data.json; the plan is for its most expensive bucket")
    words = "weights, gradients, optimizer state and EMA are in the machine's memory (fsdp2.yaml: offload_to_cpu)"
    add("--offload-to-cpu", action="store_true", help=words)
    add("--latents", action="store_true", help="images come from a latent cache, not through the VAE")
    add("--link-gbps", type=float, metavar="G", help="gigabits per second that a rank can send; adds times to the plan")
    add("--node-link-gbps", type=float, metavar="G", help="the same inside a node (default: equal)")
    words = "gigabits per second between machine and device, for --offload-to-cpu (default 200, of PCIe 4.0 x16)"
    add("--host-link-gbps", type=float, default=200.0, metavar="G", help=words)
    cards = ", ".join(f"{PEAKS[name]['bf16']:g} of {gib} GiB ({name})" for name, gib in CARDS.items())
    add("--peak-tflops", type=float, help=f"bf16 peak of a device (default by its memory: {cards})")
    add("--mfu", type=float, default=0.4, help="fraction of the peak that is reached (default 0.4)")
    add("--write-fsdp2", metavar="YAML", help="write the recommended fsdp2.yaml, with its reasons")
    add(
        "--write-native",
        metavar="DIR",
        help="instead of a plan, print the yaml that makes MindSpeed-MM's native "
        "FSDP2 engine run the model.json, data.json, fsdp2.yaml and train.args of a folder",
    )
    add("--overwrite", action="store_true", help="let --write-fsdp2 replace a file")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a run that change its plan."""
    of_config = "default: that of the train.args beside --model, or"
    for flag, published, words in (
        ("--global-batch-size", 256, "images per step"),
        ("--train-iters", 7_000_000, "steps of the run"),
        ("--context-parallel-size", 1, "ranks that share the tokens of a sample"),
    ):
        words = f"{words} ({of_config} {published})"
        parser.add_argument(flag, type=int, default=published, metavar="N", help=words)
    words = "power-function EMAs kept beside the plain EMA"
    parser.add_argument("--power-ema-stds", type=std, nargs="+", default=(), metavar="STD", help=words)
    optimizer = next(row for row in rows() if row.name == "optimizer")
    for title, adds in (("optimizer", (optimizer, optimizer_settings)), ("fine-tuning", rows_of(FineTuning))):
        group = parser.add_argument_group(title)
        for add in adds:
            add(group)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    take_from_config(args)
    check_arguments(args)
    run = RunConfig.of(vars(args))
    check_flags(run.optimizer, run.parts)
    if args.write_native:
        return write_native(args)
    model = with_tuning(load_model_config(args.model), tuning_from_flags(run))
    check_offloaded_blocks(run.offload_blocks, run.base_dtype, parameters_of(model))
    if args.data:
        model = most_expensive_in_data(model, args.data)
    run_here = Placement(
        args.world_size,
        sequence_ranks=args.context_parallel_size,
        averages=1 + len(args.power_ema_stds),
        optimizer=run.chosen_optimizer(),
        offloaded_blocks=run.offload_blocks,
        offloaded=args.offload_to_cpu,
    )
    request = Request(
        run_here,
        device_bytes=args.device_memory_gib * GIB,
        images_per_rank=max(1, args.global_batch_size * args.context_parallel_size // args.world_size),
        micro_batch_size=args.micro_batch_size,
        node_size=args.node_size,
        online_vae=not args.latents,
    )
    check_sequence_ranks(model, request)
    check_batch(request)
    chosen = recommend(model, request)
    if request.global_batch_size != args.global_batch_size:
        echo(
            f"note: {args.global_batch_size} images cannot be shared equally by {args.world_size} ranks, and training "
            f"refuses them. This plan is for --global-batch-size {request.global_batch_size}, "
            f"{request.images_per_rank} a rank.\n"
        )
    print_model(model)
    card = "" if args.peak_tflops else smallest_card(args.device_memory_gib)
    args.peak_tflops = args.peak_tflops or PEAKS[card]["bf16"]
    print_time(model, request, chosen, args, card)
    print_memory(model, request, chosen)
    print_fits(model, request)
    print_traffic(model, request, chosen, args)
    if args.write_fsdp2:
        header = (
            f"Written by mm-dit plan for {args.model} on {args.world_size} devices of {args.device_memory_gib:g} GiB:\n"
            f"--micro-batch-size {chosen.micro_batch_size} --global-batch-size {request.global_batch_size} "
            "--use-torch-fsdp2 --bf16"
        )
        Path(args.write_fsdp2).write_text(fsdp2_yaml(model, chosen, header), encoding="utf-8")
        echo(f"\n{args.write_fsdp2}: written")
    return 0


def write_native(args: argparse.Namespace) -> int:
    """Print the native engine's yaml for a config folder."""
    write = host_by_name("mindspeed-mm-native").config_of
    assert write is not None, "the native engine reads a yaml"
    echo(write(args.write_native, args.world_size), end="")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for flag values outside of their range, and for files that cannot be written."""
    if not (args.model or args.write_native):
        raise ConfigError("--model is missing. Run mm-dit plan --help for every flag.")
    for flag in (
        "world_size context_parallel_size device_memory_gib global_batch_size train_iters micro_batch_size node_size "
        "link_gbps node_link_gbps host_link_gbps mfu peak_tflops"
    ).split():
        value = getattr(args, flag)
        if value is not None and not 0 < value <= MAX_ARGUMENTS:
            raise ConfigError(
                f"{flag_of(flag)} = {shorten_repr(value)} must be positive and at most {MAX_ARGUMENTS:,}."
            )
    if args.mfu > 1:
        raise ConfigError(f"--mfu = {args.mfu} must be a fraction of the peak, at most 1. Write 0.4 for 40 %.")
    if args.node_link_gbps is not None and args.link_gbps is None:
        raise ConfigError(f"--node-link-gbps = {args.node_link_gbps:g} has no effect without --link-gbps. Give both.")
    if args.write_fsdp2:
        check_output_file("--write-fsdp2", args.write_fsdp2)
        if Path(args.write_fsdp2).exists() and not args.overwrite:
            raise ConfigError(f"--write-fsdp2 = {args.write_fsdp2} exists already. Name another, or add --overwrite.")


def take_from_config(args: argparse.Namespace) -> None:
    """Fill in missing flags of a run: from the train.args next to model.json, or with their defaults."""
    file = Path(args.model or "./model.json").with_name(FLAGS_FILE)
    parser = Parser(prog="mm-dit plan", allow_abbrev=False)
    add_run_flags(parser)
    config_args, _ = parser.parse_known_args(read_train_args(file) if args.model and file.is_file() else [])
    if args.world_size % max(config_args.context_parallel_size, 1):  # (the config is for more devices)
        config_args.context_parallel_size = 1
    for name, value in vars(config_args).items():
        if name not in args:
            setattr(args, name, value)


def most_expensive_in_data(model: ModelConfig, path: str) -> ModelConfig:
    """Return ``model`` for the most expensive of the shapes in a data.json."""
    param = with_budget(model, load_data_config(path, "--data").dataset_param)
    check_sizes(model, param)
    most_expensive = most_expensive_shape(model, param)
    if param.buckets is not None:
        shape = " x ".join(map(str, most_expensive.sample_size))
        echo(f"planned for      {shape}, the most expensive of {len(param.sizes)} buckets")
    return most_expensive


def check_sequence_ranks(model: ModelConfig, request: Request) -> None:
    """Refuse a number of ranks that cannot share a sample."""
    ranks = request.run.sequence_ranks
    if request.world_size % ranks:
        raise ConfigError(f"--context-parallel-size = {ranks} must divide --world-size {request.world_size}.")
    model.predictor.check_context_parallel(ranks)


def check_batch(request: Request) -> None:
    """Refuse a micro-batch that does not divide the images of a rank."""
    if request.images_per_rank % (request.micro_batch_size or 1):
        raise ConfigError(
            f"--micro-batch-size = {request.micro_batch_size} does not divide the {request.images_per_rank} images "
            f"that each of {request.world_size} ranks has in a step of --global-batch-size "
            f"{request.global_batch_size}. Use a divisor of them, or change --global-batch-size."
        )


def print_model(model: ModelConfig) -> None:
    """Print parameters and arithmetic."""
    parameters, each = parameters_of(model), "a clip" if _learns_videos(model) else "an image"
    by_block = parameters.by_block()
    sizes = Counter(count(by_block[block]) for block in parameters.blocks)
    in_blocks = [f"{size:,} in each of {number} blocks" for size, number in sizes.items()]
    echo(f"parameters       {parameters.num_elements():,} ({', '.join(in_blocks)})")
    if (trained := parameters.num_elements(trained_only=True)) < parameters.num_elements():
        echo(f"trained          {trained:,} of them")
    if isinstance(model.diffusion, WanFlowConfig) and model.diffusion.window != (0, 1):
        gib = 4 * parameters.num_elements() / 2**30
        echo(
            f"two experts      {gib:,.1f} GiB of float32 weights each, {2 * gib:,.1f} GiB both; one at a time in memory"
        )
    size, unit = _with_unit(multiply_adds(model.predictor), {"G": 1e9, "M": 1e6})
    echo(f"forward          {size:,.2f} {unit} multiply-adds {each}")
    size, unit = _with_unit(train_flop(model.predictor), {"TFLOP": 1e12, "GFLOP": 1e9, "MFLOP": 1e6})
    echo(f"train step       {size:,.3f} {unit} {each}")


def _with_unit(number: float, units: Mapping[str, float]) -> tuple[float, str]:
    """Return ``number`` in the first of ``units``, largest first, of which it has a tenth; else in the last."""
    name = next((name for name, unit in units.items() if number >= unit / 10), list(units)[-1])
    return number / units[name], name


def print_time(
    model: ModelConfig, request: Request, chosen: Recommendation, args: argparse.Namespace, card: str
) -> None:
    """Print how long the arithmetic of the whole run takes, on a ``card`` if no peak is named, and copying weights."""
    flop = train_flop(model.predictor) * request.global_batch_size * args.train_iters
    seconds = flop / (args.peak_tflops * 1e12 * args.mfu * request.world_size)
    units = "clips" if _learns_videos(model) else "images"
    echo(
        f"whole run        {args.train_iters:,} steps of {request.global_batch_size:,} {units}: {_lasts(seconds)} if "
        f"{request.world_size} device(s) reach {args.mfu:.0%} of {args.peak_tflops:g} TFLOP/s"
        + (f" (NVIDIA {card}; --peak-tflops for another)" if card else "")
    )
    if copied := host_traffic(model, chosen.placement, request.images_per_rank // chosen.micro_batch_size):
        copying = args.train_iters * copied * 8e-9 / args.host_link_gbps
        echo(
            f"copying weights  {copied / 1e9:,.1f} GB a step between machine and device: {_lasts(copying)} at "
            f"{args.host_link_gbps:g} Gbit/s (--host-link-gbps). The run takes the longer of both times at best, their "
            "sum at worst"
        )


def _lasts(seconds: float) -> str:
    number, unit = _with_unit(seconds, {"hours": 3600, "minutes": 60, "seconds": 1})
    return f"{number:,.1f} {unit}" if seconds >= 1 else "under a second"


def print_memory(model: ModelConfig, request: Request, chosen: Recommendation) -> None:
    """Print the memory of the recommended placement, part by part."""
    micro, placement = chosen.micro_batch_size, chosen.placement
    recompute = "on" if placement.recompute else "off"
    plan = memory(model, placement, request.online_vae)
    echo(
        f"\nrecommended      {placement.world_size} rank(s), weights shared by {placement.shard_ranks}, "
        f"micro-batch {micro} x {request.images_per_rank // micro} a step, recompute {recompute}, bf16"
    )
    if (ranks := placement.sequence_ranks) > 1:
        echo(f"                 {ranks} ranks share a sample; what they exchange for it is not counted below")
    if _learns_videos(model) and request.online_vae:
        echo("                 from features; from files autoencoder and text encoder come on top")
    units = "clips" if _learns_videos(model) else "images"
    names = ("weights", "gradients", "optimizer", "ema", "gathered", *(() if _learns_videos(model) else ("vae",)))
    note = optimizer_note(parameters_of(model), placement.optimizer)
    notes = {"optimizer": f" ({note})"} if note else {}
    parts = [(name, getattr(plan, name), notes.get(name, "")) for name in names]
    parts.append(("activations", micro * plan.activations_per_sample, f" of {micro} {units}"))
    parts.append(("workspace", micro * plan.workspace_per_sample, " (estimate)"))
    if plan.host_bytes_offloaded:
        parts.append(("in the machine", plan.host_bytes_offloaded, " a rank"))
    parts.append(("total", plan.total(micro), f" of {request.device_bytes / GIB:g} GiB"))
    unit, size = ("GiB", GIB) if plan.total(micro) >= GIB else ("MiB", 2**20)
    for name, num_bytes, more in parts:
        echo(f"  {name:<14} {num_bytes / size:8.2f} {unit}{more}")


def print_fits(model: ModelConfig, request: Request) -> None:
    """Print the largest micro-batch of every kind of sharding, with and without recompute."""
    echo(f"\n{'largest micro-batch':<24} {'kept':>8} {'recompute':>10}")
    for name, placement in kinds(request).items():
        largest = [fitting(model, dataclasses.replace(placement, recompute=again), request) for again in (False, True)]
        echo(f"  {name:<22} {largest[0]:>8} {largest[1]:>10}")


def print_traffic(model: ModelConfig, request: Request, chosen: Recommendation, args: argparse.Namespace) -> None:
    """Print bytes sent and, with --link-gbps, times."""
    rounds = request.images_per_rank // chosen.micro_batch_size
    echo(f"\n{'sent a step and rank':<24} {'in shards':>12} {'between copies':>15}", end="")
    echo(f" {'step, overlapped':>17} {'in turn':>9} {'whole run':>11}" if args.link_gbps else "")
    for name, placement in kinds(request).items():
        placement = dataclasses.replace(placement, recompute=chosen.placement.recompute)
        sent = traffic(model, placement, rounds)
        echo(f"  {name:<22} {sent.within_shards / 1e9:9.3f} GB {sent.between_replicas / 1e9:12.3f} GB", end="")
        if args.link_gbps:
            links = Links(args.link_gbps, args.node_link_gbps or args.link_gbps, request.node_size)
            images = chosen.micro_batch_size * rounds
            compute = step_time(model, placement, images, args.peak_tflops * 1e12 * args.mfu)
            copied = 8e-9 * host_traffic(model, placement, rounds) / args.host_link_gbps
            parts = compute, links.seconds(placement, sent), copied
            days = args.train_iters * max(parts) / 86400
            echo(f" {max(parts) * 1e3:14.1f} ms {sum(parts) * 1e3:6.1f} ms {days:6.2f} days", end="")
        echo()
    if args.link_gbps:
        echo("  overlapped: the longer of arithmetic and sending; in turn: their sum. The whole run is overlapped.")


def kinds(request: Request) -> dict[str, Placement]:
    """Return the placements to compare: a whole copy on every rank, one copy for all, one copy for each node."""
    W, run, node = request.world_size, request.run, request.node_size
    if run.offloaded:
        return {f"offloaded, shared by {W}": dataclasses.replace(run, shard_ranks=W)}
    shared = {f"sharded over {W}": W} if W > 1 else {}
    shared |= {f"hybrid, {node} a copy": node} if node < W and W % node == 0 else {}
    sharded = {name: dataclasses.replace(run, shard_ranks=ranks) for name, ranks in shared.items()}
    return {"replicated": dataclasses.replace(run, precision=AUTOCAST), **sharded}


def _learns_videos(model: ModelConfig) -> bool:
    return len(model.latent_shape) == 4
