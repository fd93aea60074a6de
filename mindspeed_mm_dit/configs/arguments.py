"""The command line of pretrain_dit.py: Megatron's flags with Megatron's meaning, and a few of our own.

``build_parser`` knows what the standalone host understands of Megatron-LM; ``dit_flags`` are this project's own. The
whole, with the flags of trackers and watchers, is ``training/flags.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from mindspeed_mm_dit.configs.dit_flags import dit_flags
from mindspeed_mm_dit.configs.flag_pairs import check_given
from mindspeed_mm_dit.configs.flag_types import (
    batches,
    positive_float,
    positive_int,
    threads,
    unsigned_int,
)
from mindspeed_mm_dit.configs.host_flags import HOST_ONLY
from mindspeed_mm_dit.configs.limits import FLOAT32, MOST_SAMPLES, check_path
from mindspeed_mm_dit.configs.optimizer_flags import optimizer_flags
from mindspeed_mm_dit.configs.tuning_flags import tuning_flags
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.optimizers.registry import check_flags

__all__ = ["LR_DECAY_STYLES", "Parser", "build_parser", "check_arguments", "default_micro_batch", "dit_flags"]

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")

# Flags that Megatron scripts pass along and that change nothing in the standalone host.
_WITHOUT_EFFECT = (
    "--no-gradient-accumulation-fusion",
    "--untie-embeddings-and-output-weights",
    "--use-mcore-models",
    "--no-save-rng",
    "--no-load-rng",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-async-tensor-model-parallel-allreduce",
)
_ONE_ONLY = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours and name the nearest flag."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with ``message``, its middle cut out where a value in it is very long."""
        short = message if len(message) < 500 else f"{message[:240]} ... {message[-240:]}"
        raise ConfigError("command line", short, f"{self.prog} --help explains every flag")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``; an unknown flag is an error that names the nearest known one."""
        args, unknown = self.parse_known_args(list(argv))
        if unknown:
            flag = unknown[0].partition("=")[0]
            if flag in HOST_ONLY:
                raise ConfigError(
                    f"command line: {flag}",
                    "a flag of MindSpeed-MM, which the standalone host does not know",
                    "drop it, or train in MindSpeed-MM (docs/mindspeed_mm.md)",
                )
            flags = [flag for action in self._actions for flag in action.option_strings]
            raise ConfigError(
                f"command line: {unknown[0]}",
                "unknown flag",
                f"{nearest(unknown[0], flags)}{self.prog} --help lists every flag",
            )
        return args


def build_parser(prog: str = "pretrain_dit.py") -> Parser:
    """Return the parser of the standalone host."""
    parser = Parser(
        prog=prog,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train a diffusion transformer of images or videos, by class or by text. The model is described "
        "by --mm-model, the data by --mm-data. The groups below are Megatron's flags with Megatron's meaning; the last "
        "one, DiT, is this project's own.",
    )
    megatron_flags(parser)
    return parser


def megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron-LM and MindSpeed-MM that the standalone host understands."""
    for add_group in (
        _what_to_train,
        _batches_and_length,
        _optimizer,
        _fine_tuning,
        _distribution,
        _saving_and_logging,
        _without_effect,
    ):
        add_group(parser)


def _what_to_train(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to train")
    group.add_argument("--mm-model", required=True, metavar="JSON", help="model.json: predictor, diffusion, ae")
    group.add_argument("--mm-data", required=True, metavar="JSON", help="data.json: images and how to read them")
    group.add_argument("--mm-tool", metavar="JSON", help="tools.json of MindSpeed-MM; the real host wants it")
    group.add_argument(
        "--ai-framework", choices=("pytorch", "mindspore"), default="pytorch", help="framework that does the work"
    )


def _batches_and_length(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches and length")
    group.add_argument(
        "--micro-batch-size",
        type=positive_int,
        metavar="N",
        help="images in one forward pass on one rank; default: global batch / ranks",
    )
    group.add_argument(
        "--global-batch-size",
        type=positive_int,
        metavar="N",
        help="images in one optimizer step on all ranks; default: micro batch x ranks. One of the two is needed",
    )
    group.add_argument(
        "--context-parallel-size",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks that share the tokens of a clip, and its heads while they attend (Ulysses); default 1",
    )
    group.add_argument("--train-iters", type=positive_int, required=True, metavar="N", help="optimizer steps")
    group.add_argument(
        "--seed", type=unsigned_int, default=1234, help="decides weights, sample order and every random draw"
    )
    group.add_argument(
        "--num-workers",
        type=threads,
        default=2,
        help="threads that prepare batches ahead; 0: in the training thread",
    )


def _optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--lr", type=positive_float, required=True, help="highest learning rate")
    group.add_argument("--min-lr", type=float, default=0.0, help="learning rate at the end of the decay")
    group.add_argument("--lr-decay-style", choices=LR_DECAY_STYLES, default="linear")
    group.add_argument(
        "--lr-decay-iters",
        type=positive_int,
        metavar="N",
        help="steps until --min-lr is reached; default: --train-iters",
    )
    group.add_argument("--lr-warmup-iters", type=unsigned_int, default=0, metavar="N", help="steps of linear warm-up")
    group.add_argument("--lr-warmup-init", type=float, default=0.0, help="learning rate the warm-up starts from")
    optimizer_flags(group)
    group.add_argument(
        "--weight-decay", type=float, default=0.01, help="decoupled decay; not applied to biases and other vectors"
    )
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    group.add_argument("--bf16", action="store_true", help="compute in bfloat16, keep weights in float32")


def _fine_tuning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fine-tuning")
    tuning_flags(group)
    group.add_argument("--load-base-model", dest="init_from", metavar="WEIGHTS", help="another name of --init-from")


def _distribution(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distribution")
    group.add_argument(
        "--distributed-backend",
        choices=("gloo", "nccl", "hccl"),
        default=None,
        help="default: what the device wants (gloo on CPU, nccl on CUDA, hccl on NPU)",
    )
    group.add_argument(
        "--use-torch-fsdp2",
        action="store_true",
        help="shard the model by --fsdp2-config-path; without it every rank holds all",
    )
    group.add_argument("--fsdp2-config-path", metavar="YAML", help="fsdp2.yaml; without it MindSpeed-MM's defaults")


def _saving_and_logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("saving and logging")
    group.add_argument("--save", metavar="DIR", help="folder of the checkpoints")
    group.add_argument("--load", metavar="DIR", help="folder to resume from; an empty or missing one starts anew")
    group.add_argument("--ckpt-format", choices=("torch_dcp",), default="torch_dcp")
    group.add_argument(
        "--save-interval", type=positive_int, metavar="N", help="steps between checkpoints; default: at the end only"
    )
    group.add_argument(
        "--eval-interval",
        type=positive_int,
        metavar="N",
        help="steps between validations, of dataset_param.valid_fraction",
    )
    group.add_argument(
        "--eval-iters", type=batches, default=10, metavar="N", help="global batches in one validation; 0: none"
    )
    group.add_argument(
        "--exit-duration-in-mins", type=positive_int, metavar="N", help="save and end after this many minutes"
    )
    group.add_argument(
        "--save-retain-interval",
        type=positive_int,
        metavar="N",
        help="keep the checkpoints of every N-th step for good, beside those of --keep-last",
    )
    group.add_argument("--log-interval", type=positive_int, default=1, metavar="N", help="steps between log lines")
    group.add_argument(
        "--profile", action="store_true", help="write a trace of some steps (torch.profiler, or MindSpore's)"
    )
    group.add_argument(
        "--profile-step-start", type=unsigned_int, default=10, metavar="N", help="steps taken before the trace begins"
    )
    group.add_argument("--profile-step-end", type=positive_int, default=12, metavar="N", help="steps taken at its end")
    group.add_argument(
        "--profile-ranks",
        type=unsigned_int,
        nargs="+",
        default=[],
        metavar="RANK",
        help="of which ranks; default: all",
    )
    group.add_argument("--no-load-optim", action="store_true", help="do not load the optimizer's state")
    group.add_argument("--no-save-optim", action="store_true", help="do not save the optimizer's state")


def _without_effect(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("accepted, for scripts written for Megatron-LM")
    for flag in _WITHOUT_EFFECT:
        group.add_argument(flag, action="store_true", help="no effect in the standalone host")
    for flag in _ONE_ONLY:
        group.add_argument(flag, type=int, choices=(1,), default=1, help="a DiT is trained data-parallel only")


def default_micro_batch(global_batch_size: int, world_size: int) -> int:
    """Return the micro-batch of a run that names none: each rank takes its images in one pass."""
    if global_batch_size % world_size:
        raise ConfigError(
            f"--global-batch-size = {global_batch_size}",
            f"is not divisible by the {world_size} ranks",
            "change it, or the number of ranks (NPUS_PER_NODE of pretrain.sh)",
        )
    return global_batch_size // world_size


def check_arguments(args: argparse.Namespace, world_size: int) -> None:
    """Fill dependent defaults and check flags against each other and ``world_size``, before any device work."""
    check_given(args)
    if world_size % args.context_parallel_size:
        raise ConfigError(
            f"--context-parallel-size = {args.context_parallel_size}",
            f"does not divide the {world_size} ranks",
            "use a divisor of them, or start more (NPUS_PER_NODE of pretrain.sh)",
        )
    world_size //= args.context_parallel_size  # groups of ranks that have samples of their own
    if args.global_batch_size is None and args.micro_batch_size is None:
        raise ConfigError("--micro-batch-size or --global-batch-size", "is required")
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * world_size
    if args.micro_batch_size is None:
        args.micro_batch_size = default_micro_batch(args.global_batch_size, world_size)
    if args.global_batch_size % (args.micro_batch_size * world_size):
        raise ConfigError(
            f"--global-batch-size = {args.global_batch_size}",
            f"is not divisible by micro-batch-size({args.micro_batch_size}) * ranks({world_size}) = "
            f"{args.micro_batch_size * world_size}",
            "change one of the three so that it divides",
        )
    if len(set(args.power_ema_stds)) < len(args.power_ema_stds):
        raise ConfigError(f"--power-ema-stds = {args.power_ema_stds}", "names a width twice", "name each once")
    _check(
        args,
        "train_iters",
        args.train_iters * args.global_batch_size < MOST_SAMPLES,
        f"times --global-batch-size {args.global_batch_size} is more samples than a run can count (2**62)",
    )
    _check(args, "min_lr", 0 <= args.min_lr <= args.lr, f"must lie between 0 and --lr ({args.lr})")
    _check(args, "lr_warmup_init", 0 <= args.lr_warmup_init <= args.lr, f"must lie between 0 and --lr ({args.lr})")
    check_flags(args)
    for name in ("weight_decay", "clip_grad"):
        _check(args, name, 0 <= getattr(args, name) <= FLOAT32[1], "must be a number of at least 0 that float32 holds")
    if args.load:
        check_path("--load", args.load)
    decay_iters = args.lr_decay_iters or args.train_iters
    decay_flag = "--lr-decay-iters" if args.lr_decay_iters else "--train-iters (or set --lr-decay-iters)"
    if args.lr_decay_style != "constant":
        _check(
            args,
            "lr_warmup_iters",
            args.lr_warmup_iters < decay_iters,
            f"must be smaller than the steps of decay ({decay_iters})",
            f"set --lr-warmup-iters below {decay_iters}, raise {decay_flag}, or use --lr-decay-style constant",
        )


def _check(args: argparse.Namespace, name: str, good: bool, reason: str, cure: str = "") -> None:
    if not good:
        raise ConfigError(f"--{name.replace('_', '-')} = {getattr(args, name)}", reason, cure)
