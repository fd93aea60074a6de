"""What a run is: one frozen record with a field for each flag of pretrain_dit.py, and what is known of it beside them.

A field is a row (``flag.Flag``): what the flag is called and takes, and what it means in each host. Everything that
lists flags reads the rows: the parsers and ``--help``, the yaml of the native engine, what a host does nothing with,
what a resumed run compares with its checkpoint, what a run that leaves nothing behind goes without. Flags of optimizers
and trackers are the fields of their own configs, and watchers add theirs: they are in ``parts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mindspeed_mm_dit.configs.flag import BOTH, AddFlags, Flag, flag, rows_of
from mindspeed_mm_dit.configs.flag_types import (
    batches,
    finite_float,
    fraction,
    positive_float,
    positive_int,
    std,
    threads,
    unsigned_int,
)
from mindspeed_mm_dit.configs.mm_args import MultiModalArguments
from mindspeed_mm_dit.configs.optimizer_flags import optimizer_settings
from mindspeed_mm_dit.configs.tuning_flags import FineTuning
from mindspeed_mm_dit.optimizers.contract import Chosen
from mindspeed_mm_dit.optimizers.registry import DEFAULT, OPTIMIZERS, chosen_by


def _needed(metavar: str | None = None, **takes: Any) -> dict[str, Any]:
    return {"required": True, "metavar": metavar, **takes}


def _of(kind: Callable[[str], Any] | None, metavar: str | None = None, **takes: Any) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, **takes}


def _one_of(*choices: str) -> dict[str, Any]:
    return {"choices": choices}


def _ignored() -> Any:
    return flag("no effect in the standalone host", False)


def _one() -> Any:
    return flag("a DiT is trained data-parallel only", 1, {"type": int, "choices": (1,)})


@dataclass(frozen=True, kw_only=True)
class WhatToTrain:
    """What is trained, and by what."""

    mm_model: str = flag(
        "model.json: predictor, diffusion, ae", takes=_needed("JSON"), native="model.mm_model", added_key=True
    )
    mm_data: str = flag(
        "data.json: images and how to read them",
        takes=_needed("JSON"),
        native="data.dataset_param.mm_data",
        added_key=True,
    )
    mm_tool: str | None = flag("tools.json of MindSpeed-MM; the real host wants it", takes=_of(None, "JSON"))
    ai_framework: str = flag(
        "framework that does the work",
        "pytorch",
        _one_of("pytorch", "mindspore"),
        refused_in=("native",),
        refusal="runs on PyTorch",
        cure="use pytorch, or --host standalone",
    )


@dataclass(frozen=True, kw_only=True)
class Length:
    """How many samples are in a step, and how many steps there are."""

    micro_batch_size: int = flag(
        "images in one forward pass on one rank; default: global batch / ranks",
        takes=_of(positive_int, "N"),
        native="training.micro_batch_size",
    )
    global_batch_size: int = flag(
        "images in one optimizer step on all ranks; default: micro batch x ranks. One of the two is needed",
        takes=_of(positive_int, "N"),
        native_counts="training.gradient_accumulation_steps",
        compared="fact",
    )
    context_parallel_size: int = flag(
        "ranks that share the tokens of a clip, and its heads while they attend (Ulysses); default 1",
        1,
        _of(positive_int, "N"),
        native="parallel.ulysses_parallel_size",
    )
    train_iters: int = flag("optimizer steps", takes=_needed("N", type=positive_int), native="training.train_iters")
    seed: int = flag(
        "decides weights, sample order and every random draw",
        1234,
        _of(unsigned_int),
        native="training.seed",
        compared="fact",
    )
    num_workers: int = flag(
        "threads that prepare batches ahead; 0: in the training thread",
        2,
        _of(threads),
        native="data.dataset_param.num_workers",
        added_key=True,
    )


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """How a step moves the weights; the settings of each optimizer are flags beside these."""

    lr: float = flag(
        "highest learning rate", takes=_needed(type=positive_float), native="training.lr", compared="setting"
    )
    min_lr: float = flag("learning rate at the end of the decay", 0.0, _of(float), native="training.lr_min")
    lr_decay_style: str = flag(
        None,
        "linear",
        _one_of("constant", "linear", "cosine", "inverse-square-root"),
        native="training.lr_decay_style",
        compared="setting",
    )
    lr_decay_iters: int | None = flag(
        "steps until --min-lr is reached; default: --train-iters",
        takes=_of(positive_int, "N"),
        native_counts="training.lr_decay_ratio",
    )
    lr_warmup_iters: int = flag(
        "steps of linear warm-up",
        0,
        _of(unsigned_int, "N"),
        native_counts="training.lr_warmup_ratio",
        compared="setting",
    )
    lr_warmup_init: float = flag(
        "learning rate the warm-up starts from", 0.0, _of(float), native="training.lr_start", compared="setting"
    )
    optimizer: str = flag(
        f"what steps the weights: {', '.join(OPTIMIZERS)}, or a plugin's",
        DEFAULT,
        {"metavar": "NAME"},
        native="training.optimizer",
        refused_in=("megatron",),
        refusal="goes on with the moments of AdamW alone",
    )
    weight_decay: float = flag(
        "decoupled decay; not applied to biases and other vectors",
        0.01,
        _of(float),
        native="training.weight_decay",
        compared="setting",
    )
    clip_grad: float = flag(
        "largest gradient norm; 0: no clipping", 1.0, _of(float), native="training.clip_grad", compared="setting"
    )
    bf16: bool = flag("compute in bfloat16, keep weights in float32", False, native="model.bf16", added_key=True)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How ranks share the work."""

    distributed_backend: str | None = flag(
        "default: what the device wants (gloo on CPU, nccl on CUDA, hccl on NPU)",
        takes=_one_of("gloo", "nccl", "hccl"),
        idle_in=("native",),
    )
    use_torch_fsdp2: bool = flag("shard the model by --fsdp2-config-path; without it every rank holds all", False)
    fsdp2_config_path: str | None = flag("fsdp2.yaml; without it MindSpeed-MM's defaults", takes=_of(None, "YAML"))


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """What a run keeps and says, and when."""

    save: str | None = flag(
        "folder of the checkpoints", takes=_of(None, "DIR"), native="training.save", when_quiet=False
    )
    load: str | None = flag(
        "folder to resume from; an empty or missing one starts anew",
        takes=_of(None, "DIR"),
        native="training.load",
        when_quiet=False,
    )
    ckpt_format: str = flag(None, "torch_dcp", _one_of("torch_dcp"))
    save_interval: int | None = flag(
        "steps between checkpoints; default: at the end only",
        takes=_of(positive_int, "N"),
        native_counts="training.save_interval",
    )
    eval_interval: int | None = flag(
        "steps between validations, of dataset_param.valid_fraction",
        takes=_of(positive_int, "N"),
        native_counts="training.val_interval",
    )
    eval_iters: int = flag(
        "global batches in one validation; 0: none",
        10,
        _of(batches, "N"),
        native="data.dataset_param.eval_iters",
        added_key=True,
    )
    exit_duration_in_mins: int | None = flag(
        "save and end after this many minutes",
        takes=_of(positive_int, "N"),
        native="training.exit_duration_in_mins",
        added_key=True,
        when_quiet=False,
    )
    save_retain_interval: int | None = flag(
        "keep the checkpoints of every N-th step for good, beside those of --keep-last",
        takes=_of(positive_int, "N"),
        native="training.save_retain_interval",
        added_key=True,
        needs=("save", "save_interval"),
    )
    log_interval: int = flag("steps between log lines", 1, _of(positive_int, "N"), native="training.log_interval")
    profile: bool = flag(
        "write a trace of some steps (torch.profiler, or MindSpore's)", False, idle_in=("native",), when_quiet=False
    )
    profile_step_start: int = flag("steps taken before the trace begins", 10, _of(unsigned_int, "N"))
    profile_step_end: int = flag("steps taken at its end", 12, _of(positive_int, "N"))
    profile_ranks: tuple[int, ...] = flag("of which ranks; default: all", (), _of(unsigned_int, "RANK", nargs="+"))
    no_load_optim: bool = flag("do not load the optimizer's state", False, native="training.no_load_optim")
    no_save_optim: bool = flag("do not save the optimizer's state", False, native="training.no_save_optim")


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Taken, for scripts written for Megatron-LM."""

    no_gradient_accumulation_fusion: bool = _ignored()
    untie_embeddings_and_output_weights: bool = _ignored()
    use_mcore_models: bool = _ignored()
    no_save_rng: bool = _ignored()
    no_load_rng: bool = _ignored()
    no_masked_softmax_fusion: bool = _ignored()
    no_bias_gelu_fusion: bool = _ignored()
    no_async_tensor_model_parallel_allreduce: bool = _ignored()
    tensor_model_parallel_size: int = _one()
    pipeline_model_parallel_size: int = _one()
    expert_model_parallel_size: int = _one()


@dataclass(frozen=True, kw_only=True)
class Own:
    """This project's own flags, which the real host's parser is given as well."""

    host: str = flag(
        "what runs the training: standalone, mindspeed-mm, mindspeed-mm-native (its FSDP2 engine) or a "
        "plugin's; auto: the real MindSpeed-MM where it is installed",
        "auto",
        when_quiet=False,
    )
    init_from: str | None = flag(
        "begin with weights of the same kind of network, in any format, of other classes or another "
        "size; a checkpoint in --load comes first",
        takes=_of(None, "WEIGHTS"),
        native="model.init_from",
        added_key=True,
        refused_in=("megatron",),
        refusal="begins with weights of the seed alone",
        cure="begin with --host standalone --train-iters 1 --save NEW, then go on here with --load NEW",
    )
    mm_valid_data: str | None = flag(
        "data.json of samples to validate on, all of them; default: those that dataset_param.valid_fraction of "
        "--mm-data holds out",
        takes=_of(None, "JSON"),
        native="data.val_dataset_param.mm_data",
        added_key=True,
        refused_in=("megatron",),
        refusal="validates on what --mm-data holds out",
        cure="set valid_fraction there, or use --host standalone",
    )
    loss_by: str = flag(
        "what the loss of a step is a mean over where samples have several shapes (buckets): its samples, or their "
        "tokens, so that larger samples count for more",
        "sample",
        _one_of("sample", "token"),
        native="model.loss_by",
        added_key=True,
        compared="setting",
    )
    init_verbose: bool = flag(
        "say of each tensor what --init-from made of it", False, idle_in=BOTH, needs=("init_from",)
    )
    dry_run: bool = flag(
        "check everything, say what would be trained, and end with code 0",
        False,
        refused_in=("native",),
        refusal="checks while it begins to train",
        cure="use --host standalone --dry-run, which looks at the same files",
    )
    ema_decay: float = flag(
        "decay of the moving average of the weights that samples are drawn from",
        0.9999,
        _of(fraction),
        native="model.ema_decay",
        added_key=True,
        compared="fact",
    )
    power_ema_stds: tuple[float, ...] = flag(
        "also keep averages over a share of the run (Karras et al. 2024), one for each width, "
        "0.05 0.1 as published; mm-dit ema makes any other width of them afterwards. Each takes the memory of the "
        "weights",
        (),
        _of(std, "STD", nargs="+"),
        refused_in=BOTH,
        refusal="keeps the plain average alone",
    )
    pynative: bool = flag("MindSpore: run operator by operator instead of compiling the step", False, idle_in=BOTH)
    tf32: bool = flag(
        "let float32 products round their inputs to TensorFloat-32 (NVIDIA GPUs, PyTorch): faster, and off "
        "by about 1e-3; facebookresearch/DiT trains so",
        False,
        idle_in=BOTH,
    )
    torch_compile: bool = flag(
        "compile the transformer blocks (PyTorch): faster steps after a minute or so of compiling", False, idle_in=BOTH
    )
    peak_tflops: float | None = flag(
        "peak of one device, for the MFU in TensorBoard and the progress bar; default: from a table, if known",
        takes=_of(positive_float, "TFLOPS"),
        idle_in=BOTH,
    )
    keep_last: int | None = flag(
        "checkpoints to keep", 2, _of(positive_int, "N"), native="training.keep_last", added_key=True,
        idle_in=("megatron",),
    )  # fmt: skip
    keep_best: bool = flag(
        "save whenever a validation finds a smaller loss than all before, and keep the last of these: DIR/best",
        False,
        idle_in=BOTH,
        when_quiet=False,
    )
    no_async_save: bool = flag("write checkpoints in the training thread", False, idle_in=("megatron",))
    report: str | None = flag(
        "at the end draw samples.png and, of what --tensorboard-dir keeps, loss.png beside the checkpoint "
        "folder, where that takes no longer than the training did; always: however long it takes",
        takes={"nargs": "?", "const": "short", "choices": ["short", "always"]},
        when_quiet=False,
    )
    sample_interval: int = flag(
        "steps between grids of samples, of the same noise and classes, by the moving average; 0: none",
        0,
        _of(unsigned_int, "N"),
        idle_in=BOTH,
        when_quiet=False,
    )
    report_sampler: str | None = flag(
        "sampler of the report; default: the quick one of what is learned", takes=_of(None, "NAME")
    )
    report_steps: int = flag("sampling steps of the report", 50, _of(positive_int))
    report_cfg_scale: float = flag("guidance scale of the report and of --sample-interval", 2.0, _of(finite_float))


@dataclass(frozen=True, kw_only=True)
class RunConfig(WhatToTrain, Length, Optimization, FineTuning, Distribution, Keeping, Accepted, Own):
    """A run: its flags, typed, and what has been found of it. Frozen: a step that knows more returns another one."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    """Flags of optimizers, trackers and watchers, by name; in the real host all others of its own too."""
    mm: MultiModalArguments = None  # type: ignore[assignment]
    """The config files; None until they are read."""
    consumed_train_samples: int = 0
    """Samples before the next step."""
    begun_at: int = 0
    """Steps before this process."""

    @classmethod
    def of(cls, given: Mapping[str, Any], **known: Any) -> RunConfig:
        """Return the run of flags ``given`` by name, as a parser of any host has them, and what is ``known`` beside."""
        names = {each.name for each in fields(cls)}
        own = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if name in names}
        parts = {name: value for name, value in given.items() if name not in names}
        return cls(**{"parts": parts, **own, **known})

    def chosen_optimizer(self) -> Chosen:
        """Return the optimizer with its settings; raises ConfigError for one that cannot be."""
        return chosen_by(self.optimizer, self.parts)

    def flags(self) -> dict[str, Any]:
        """Return the value of every flag by its name, those of parts too."""
        return {**self.parts, **{row.name: getattr(self, row.name) for row in rows()}}


def _load_base_model(group: Any) -> None:
    group.add_argument("--load-base-model", dest="init_from", metavar="WEIGHTS", help="another name of --init-from")


MEGATRON: Mapping[str, tuple[type, tuple[AddFlags, ...]]] = {
    "what to train": (WhatToTrain, ()),
    "batches and length": (Length, ()),
    "optimizer": (Optimization, (optimizer_settings,)),
    "fine-tuning": (FineTuning, (_load_base_model,)),
    "distribution": (Distribution, ()),
    "saving and logging": (Keeping, ()),
    "accepted, for scripts written for Megatron-LM": (Accepted, ()),
}
"""Megatron's flags with Megatron's meaning, by the group of --help: those that the standalone host understands."""


def rows() -> list[Flag]:
    """Return all rows, in the order of --help."""
    return [row for group in (*(group for group, _ in MEGATRON.values()), Own) for row in rows_of(group)]
