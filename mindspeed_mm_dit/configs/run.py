"""The settings of a run: one frozen record with a field for each flag of pretrain_dit.py.

A row (``flag.Flag``) describes each field. Everything that lists flags reads the rows: the parsers and ``--help``, the
comparison of a resumed run with its checkpoint, and runs that write nothing. What a flag means inside MindSpeed-MM:
``integrations/mindspeed_mm/flags.py``. Flags of optimizers, metrics loggers and callbacks are defined by them; a run
keeps these in ``parts``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.flag import (
    AddFlags,
    Flag,
    batches,
    finite_float,
    flag,
    fraction,
    positive_float,
    positive_int,
    rows_of,
    std,
    threads,
    unsigned_int,
    window,
)
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config, Precision
from mindspeed_mm_dit.configs.limits import check_path
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.tuning import FineTuning
from mindspeed_mm_dit.errors import ConfigError, flag_of
from mindspeed_mm_dit.optimizers.contract import ConfiguredOptimizer
from mindspeed_mm_dit.optimizers.registry import DEFAULT, OPTIMIZERS, optimizer_from_flags, settings


def optimizer_settings(group: Any) -> None:
    """Add a flag for each optimizer setting to ``group``; optimizers with the same setting share the flag.

    Raises ConfigError if a plugin's setting has the name of an existing flag.
    """
    for name, (setting, owners) in settings().items():
        text = f"{', '.join(owners)}: {setting.metadata['help']}".replace("%", "%%")
        kind = get_type_hints(OPTIMIZERS[owners[0]].config)[name]
        options: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        options |= setting.metadata["how"]
        try:
            action = group.add_argument(flag_of(name), default=setting.default, **options)
        except argparse.ArgumentError:
            raise ConfigError(
                f"The setting {name!r} of optimizer {owners[0]!r} is a flag of this command already. Rename it."
            ) from None
        action.help = text  # (in add_argument, Python 3.10 would append a default to BooleanOptionalAction)


_NAMES = """
--accumulate-allreduce-grads-in-fp32 --async-save --attention-dropout --auto-settings
--calculate-per-sample-loss --ckpt-step --dataloader-type --ddp-bucket-size --downcast-to-bf16
--exit-interval --exit-signal-handler --finetune --fp16 --hidden-dropout
--hidden-size --init-model-with-meta-device --initial-loss-scale --jit-compile --log-throughput --log-tps
--lora-apply-modules --lora-mixed-training --lora-register-forward-hook --lora-target-parameters
--lr-mult --lr-scale-modules --lr-warmup-fraction --max-position-embeddings
--num-attention-heads --num-layers --optimizer-selection --overlap-grad-reduce --overlap-param-gather
--override-opt_param-scheduler --position-embedding-type --recompute-granularity --recompute-method
--recompute-num-layers --seq-length --sequence-parallel --swiglu --tokenizer-type --train-samples
--trust-remote-code --use-checkpoint-opt_param-scheduler --use-cpu-initialization --use-data-balance
--use-deter-comp --use-distributed-optimizer --use-flash-attn --use-fused-rmsnorm
--weight-decay-exclude-modules
"""

MINDSPEED_MM_ONLY_FLAGS = frozenset(_NAMES.split())
"""Flags of MindSpeed-MM that DiT scripts often contain."""


@dataclass(frozen=True)
class MultiModalArguments:
    """Megatron's ``args.mm``: the parsed config files."""

    model: ModelConfig
    data: DataConfig
    fsdp2: Fsdp2Config | None
    """None without --use-torch-fsdp2."""
    model_json: dict[str, Any]
    """model.json with preset and autoencoder settings filled in; saved in every checkpoint."""
    precision: Precision | None = None
    """Precision of a step; None: MindSpeed-MM decides it, without FSDP2."""
    classes: tuple[str, ...] = ()
    """Name of each label; saved in every checkpoint."""
    data_digest: str = ""
    """Number of samples and a digest of them; saved in every checkpoint."""
    autoencoder: str = ""
    """Digest of the autoencoder's files; saved in every checkpoint."""
    valid_data: DataConfig | None = None
    """Validation data, if --mm-valid-data names it; otherwise ``data`` decides what is held out."""
    saved_classes: tuple[str, ...] = ()
    """Class names in the checkpoint of --load; the same set of names keeps its numbers."""
    base: str = ""
    """Digest of the weights that adapters belong to; saved in every checkpoint. Empty without adapters."""
    captions: tuple[str, ...] = ()
    """A few captions of the data, as example prompts; saved in every checkpoint."""
    words: tuple[str, ...] = ()
    """All words of the captions, if the model knows no others; saved in every checkpoint."""
    offload_blocks: int = 0
    """Number of blocks whose frozen weights wait in the machine's memory."""
    data_set: Any = field(default=None, compare=False, repr=False)
    """The samples (``training.data_set.DataSet``), which the checks before a run open once; None until then."""

    @property
    def encodes(self) -> bool:
        """Whether images, or clips and captions, are encoded during training, rather than read from a cache."""
        return self.data.dataset_param.cache is None


def with_facts(mm: MultiModalArguments, data: Mapping[str, Any]) -> MultiModalArguments:
    """Return ``mm`` with the facts about data (``DataSet.facts``) and autoencoder that every checkpoint saves."""
    digest = mm.model.ae.digest()
    autoencoder = f"files {digest[:12]}" if digest else ""
    return replace(mm, **data, autoencoder=autoencoder)


def _ignored() -> Any:
    return flag("no effect in the standalone host", False)


def _data_parallel_only() -> Any:
    return flag("a DiT is trained data-parallel only", 1, type=int, choices=(1,))


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Model, data and framework."""

    mm_model: str = flag("model.json: the network, the diffusion and the autoencoder", required=True, metavar="JSON")
    mm_data: str = flag("data.json: the data set and how to read it", required=True, metavar="JSON")
    timestep_window: tuple[float, float] | None = flag(
        "train at these noise levels alone, as one expert of Wan 2.2 does; replaces diffusion.timestep_window",
        type=window,
        metavar="LOW,HIGH",
    )
    mm_tool: str | None = flag("tools.json of MindSpeed-MM; only the real MindSpeed-MM needs it", metavar="JSON")
    ai_framework: str = flag("framework to train with", "pytorch", choices=("pytorch", "mindspore"))


@dataclass(frozen=True, kw_only=True)
class BatchArgs:
    """Batch sizes, number of steps, seed and workers."""

    micro_batch_size: int = flag(
        "samples in one forward pass on one rank; default: global batch size / ranks", type=positive_int, metavar="N"
    )
    global_batch_size: int = flag(
        "samples in one optimizer step, over all ranks; default: micro-batch size x ranks. Set at least one of the two",
        type=positive_int,
        metavar="N",
        compared="fact",
    )
    context_parallel_size: int = flag(
        "ranks that split each sample: its tokens, and its heads inside attention (Ulysses)",
        1,
        type=positive_int,
        metavar="N",
    )
    train_iters: int = flag("optimizer steps to train for", required=True, metavar="N", type=positive_int)
    seed: int = flag(
        "seed of the initial weights, the sample order and all random numbers of training",
        1234,
        type=unsigned_int,
        compared="fact",
    )
    num_workers: int = flag(
        "threads that prepare batches ahead; 0: prepare them in the training thread", 2, type=threads
    )


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Learning rate, optimizer and precision; each optimizer adds flags for its own settings."""

    lr: float = flag("peak learning rate", required=True, type=positive_float, compared="setting")
    min_lr: float = flag("learning rate at the end of the decay", 0.0, type=float)
    lr_decay_style: str = flag(
        "how the learning rate falls from --lr to --min-lr",
        "linear",
        choices=("constant", "linear", "cosine", "inverse-square-root"),
        compared="setting",
    )
    lr_decay_iters: int | None = flag(
        "steps until --min-lr is reached; default: --train-iters", type=positive_int, metavar="N"
    )
    lr_warmup_iters: int = flag("steps of linear warm-up", 0, type=unsigned_int, metavar="N", compared="setting")
    lr_warmup_init: float = flag("learning rate the warm-up starts from", 0.0, type=float, compared="setting")
    optimizer: str = flag(
        "optimizer: adam, muon, one from a plugin, or any PyTorch optimizer as module:Class, such as "
        "torch.optim:Adafactor (docs/recipes.md)",
        DEFAULT,
        metavar="NAME",
    )
    weight_decay: float = flag(
        "decoupled weight decay; biases and other vectors have none", 0.01, type=float, compared="setting"
    )
    clip_grad: float = flag("clip the gradient norm to this; 0: no clipping", 1.0, type=float, compared="setting")
    bf16: bool = flag("compute in bfloat16; the weights stay in float32", False)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How ranks share the work."""

    distributed_backend: str | None = flag(
        "communication backend; default: chosen by the device (gloo on CPU, nccl on CUDA, hccl on NPU)",
        choices=("gloo", "nccl", "hccl"),
    )
    use_torch_fsdp2: bool = flag(
        "shard the model as --fsdp2-config-path says; without this flag every rank holds the whole model", False
    )
    fsdp2_config_path: str | None = flag(
        "fsdp2.yaml: how to shard the model; default: MindSpeed-MM's defaults", metavar="YAML"
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointArgs:
    """Checkpoints, validation, logging and profiling."""

    save: str | None = flag("folder to write checkpoints to", metavar="DIR", is_output=True)
    load: str | None = flag(
        "folder of checkpoints to resume from; if it is empty or missing, the run starts from scratch",
        metavar="DIR",
        is_output=True,
    )
    ckpt_format: str = flag("format of the checkpoints", "torch_dcp", choices=("torch_dcp",))
    save_interval: int | None = flag(
        "steps between checkpoints; default: save only at the end", type=positive_int, metavar="N"
    )
    eval_interval: int | None = flag(
        "steps between validations on the samples that dataset_param.valid_fraction holds out",
        type=positive_int,
        metavar="N",
    )
    eval_iters: int = flag("global batches in one validation; 0: none", 10, type=batches, metavar="N")
    exit_duration_in_mins: int | None = flag(
        "save a checkpoint and exit after this many minutes", type=positive_int, metavar="N", is_output=True
    )
    save_retain_interval: int | None = flag(
        "also keep the checkpoint of every N-th step forever, in addition to the newest --keep-last",
        type=positive_int,
        metavar="N",
        needs=("save", "save_interval"),
        is_output=True,
    )
    log_interval: int = flag("steps between log lines", 1, type=positive_int, metavar="N")
    profile: bool = flag(
        "write a trace of a few steps (torch.profiler, or MindSpore's profiler)", False, is_output=True
    )
    profile_step_start: int = flag("steps to run before the trace starts", 10, type=unsigned_int, metavar="N")
    profile_step_end: int = flag("number of steps run when the trace ends", 12, type=positive_int, metavar="N")
    profile_ranks: tuple[int, ...] = flag(
        "ranks to trace; default: all", (), type=unsigned_int, metavar="RANK", nargs="+"
    )
    no_load_optim: bool = flag("do not load the optimizer state", False)
    no_save_optim: bool = flag("do not save the optimizer state", False)


@dataclass(frozen=True, kw_only=True)
class IgnoredArgs:
    """Flags that are accepted so that scripts written for Megatron-LM run."""

    no_gradient_accumulation_fusion: bool = _ignored()
    untie_embeddings_and_output_weights: bool = _ignored()
    use_mcore_models: bool = _ignored()
    no_save_rng: bool = _ignored()
    no_load_rng: bool = _ignored()
    no_masked_softmax_fusion: bool = _ignored()
    no_bias_gelu_fusion: bool = _ignored()
    no_async_tensor_model_parallel_allreduce: bool = _ignored()
    tensor_model_parallel_size: int = _data_parallel_only()
    pipeline_model_parallel_size: int = _data_parallel_only()
    expert_model_parallel_size: int = _data_parallel_only()


@dataclass(frozen=True, kw_only=True)
class DiTArgs:
    """This project's own flags; MindSpeed-MM's parser gets them too."""

    host: str = flag(
        "program that runs the training: standalone, mindspeed-mm, mindspeed-mm-native (its FSDP2 engine) or a "
        "plugin's; auto: the real MindSpeed-MM if it is installed, else standalone",
        "auto",
        is_output=True,
    )
    init_from: str | None = flag(
        "fine-tune from these weights, in any format; the network must be of the same kind but may have other classes "
        "or another input size. A checkpoint in --load takes precedence",
        metavar="WEIGHTS",
    )
    mm_valid_data: str | None = flag(
        "data.json of a separate validation set, used in full; default: validate on the samples that "
        "dataset_param.valid_fraction of --mm-data holds out",
        metavar="JSON",
    )
    loss_by: str = flag(
        "how to average the loss when samples have several shapes (buckets): over samples, or over tokens, so that "
        "larger samples count for more",
        "sample",
        choices=("sample", "token"),
        compared="setting",
    )
    init_verbose: bool = flag("print what --init-from did with each tensor", False, needs=("init_from",))
    dry_run: bool = flag("check everything, print what would be trained, and exit with code 0", False)
    ema_decay: float = flag(
        "decay of the EMA of the weights; samples are generated with the EMA", 0.9999, type=fraction, compared="fact"
    )
    power_ema_stds: tuple[float, ...] = flag(
        "also keep power-function EMAs (Karras et al. 2024), one for each of these widths, relative to the length of "
        "the run; published: 0.05 0.1. mm-dit ema makes any other width from them after training. Each takes as much "
        "memory as the weights",
        (),
        type=std,
        metavar="STD",
        nargs="+",
    )
    pynative: bool = flag("MindSpore: run operator by operator instead of compiling the step", False)
    tf32: bool = flag(
        "round the inputs of float32 matrix products to TensorFloat-32 (NVIDIA GPUs, PyTorch): faster, with errors "
        "of about 1e-3; facebookresearch/DiT trains with it",
        False,
    )
    torch_compile: bool = flag(
        "compile the transformer blocks (PyTorch): about a minute of compiling, then faster steps", False
    )
    peak_tflops: float | None = flag(
        "peak TFLOP/s of one device, to show the MFU in TensorBoard and the progress bar; default: from a table of "
        "known devices",
        type=positive_float,
        metavar="TFLOPS",
    )
    keep_last: int | None = flag("number of newest checkpoints to keep", 2, type=positive_int, metavar="N")
    keep_best: bool = flag(
        "save whenever a validation reaches a new lowest loss, and keep that checkpoint; "
        "mm-dit finds it as DIR/best (--save DIR)",
        False,
        is_output=True,
    )
    no_async_save: bool = flag("write checkpoints in the training thread, not in the background", False)
    report: str | None = flag(
        "at the end, write samples.png and, with --tensorboard-dir, loss.png next to the checkpoint folder; skipped if "
        "it would take longer than the training did. always: never skip it",
        nargs="?",
        const="short",
        choices=["short", "always"],
        is_output=True,
    )
    sample_interval: int = flag(
        "steps between grids of samples, generated with the EMA from the same noise and classes each time; 0: none",
        0,
        type=unsigned_int,
        metavar="N",
        is_output=True,
    )
    sample_prompts: str | None = flag(
        "text file with a prompt a line, for --report and --sample-interval; default: varied captions of the data",
        metavar="FILE",
    )
    report_sampler: str | None = flag("sampler of the report; default: the quick one of the objective", metavar="NAME")
    report_steps: int = flag("sampling steps of the report", 50, type=positive_int)
    report_cfg_scale: float = flag("guidance scale of the report and of --sample-interval", 2.0, type=finite_float)


@dataclass(frozen=True, kw_only=True)
class RunConfig(ModelArgs, BatchArgs, Optimization, FineTuning, Distribution, CheckpointArgs, IgnoredArgs, DiTArgs):
    """A run: its typed flags, and facts found at startup. Frozen: code that adds a fact returns a new record."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    """Flags of optimizers, metrics loggers and callbacks, by name; in MindSpeed-MM also all of its flags."""
    mm: MultiModalArguments = None  # type: ignore[assignment]
    """The config files; None until they are read."""
    consumed_train_samples: int = 0
    """Samples consumed before the next step."""
    start_iteration: int = 0
    """Steps completed before this process started."""

    @classmethod
    def of(cls, parsed: Mapping[str, Any], **known: Any) -> RunConfig:
        """Return the run with the flags ``parsed`` by any host's parser, by name, and other fields in ``known``."""
        names = {each.name for each in fields(cls)}
        flags = {name: tuple(v) if isinstance(v, list) else v for name, v in parsed.items() if name in names}
        parts = {name: value for name, value in parsed.items() if name not in names}
        return cls(**{"parts": parts, **flags, **known})

    def chosen_optimizer(self) -> ConfiguredOptimizer:
        """Return the optimizer with its settings; raises ConfigError for an invalid one."""
        return optimizer_from_flags(self.optimizer, self.parts)

    def flags(self) -> dict[str, Any]:
        """Return the value of every flag by name, including those in ``parts``."""
        return {**self.parts, **{row.name: getattr(self, row.name) for row in rows()}}


def _load_base_model(group: Any) -> None:
    group.add_argument("--load-base-model", dest="init_from", metavar="WEIGHTS", help="alias of --init-from")


MEGATRON_FLAG_GROUPS: Mapping[str, tuple[type, tuple[AddFlags, ...]]] = {
    "what to train": (ModelArgs, ()),
    "batches and length": (BatchArgs, ()),
    "optimizer": (Optimization, (optimizer_settings,)),
    "fine-tuning": (FineTuning, (_load_base_model,)),
    "distribution": (Distribution, ()),
    "saving and logging": (CheckpointArgs, ()),
    "accepted, for scripts written for Megatron-LM": (IgnoredArgs, ()),
}
"""Megatron's flags that the standalone host understands, with Megatron's meaning, by their group in --help."""


def rows() -> list[Flag]:
    """Return the rows of all flags, in the order of --help."""
    return [
        row for group in (*(group for group, _ in MEGATRON_FLAG_GROUPS.values()), DiTArgs) for row in rows_of(group)
    ]


def check_output_file(flag: str, path: str | Path, make: bool = True) -> None:
    """Create the folder of the file ``path`` and raise ConfigError unless the file can be written there.

    ``flag`` is the option that named it, e.g. "--output". The file itself is not touched; without ``make``, neither is
    its folder.
    """
    check_path(flag, str(path))
    what, path = f"{flag} = {path}", Path(os.path.realpath(path))  # where a link leads
    if os.path.isdir(path):  # (Path.is_dir would raise where permission is missing)
        raise ConfigError(f"{what} is a folder. Give the path of a file.")
    if make:
        _make_folder(what, path.parent)
    if os.path.exists(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{what} cannot be written. Choose another path, or change its permissions.")
    else:
        _check_writable(what, _nearest(path.parent))


def check_output_folder(flag: str, path: str | Path, make: bool = True) -> None:
    """Create the folder ``path`` and raise ConfigError unless it is writable; without ``make``, only check."""
    check_path(flag, str(path))
    path = Path(path)
    what = f"{flag} = {path}"
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"{what} is a file, but must be a folder. Choose another path.")
    if make:
        _make_folder(what, path)
    nearest = _nearest(path)
    if not os.path.isdir(nearest):
        raise ConfigError(f"{what} cannot be created: {nearest} is a file. Choose another path.")
    _check_writable(what, nearest)


def _nearest(folder: Path) -> Path:
    """Return ``folder`` or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def _make_folder(what: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{what} needs the folder {folder}, which cannot be created: {error.strerror}. Choose another path."
        ) from None


def _check_writable(what: str, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{what} cannot be written: no file can be created in {folder}. Choose another path, or change its "
            "permissions."
        )
