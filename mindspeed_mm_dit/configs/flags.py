"""The flags of pretrain_dit.py, one row each: what it is called, what it takes, and what it means in each host.

Everything that lists flags reads it from here: the parsers and ``--help``, the yaml of the native engine, what a host
does nothing with, what a resumed run compares with its checkpoint, what a run that leaves nothing behind goes without.
Flags of optimizers and trackers are the fields of their own configs; watchers and adapters add theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_mm_dit.configs.flag import AddFlags, Flag, Host
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
from mindspeed_mm_dit.configs.optimizer_flags import OPTIMIZER, optimizer_settings
from mindspeed_mm_dit.configs.tuning_flags import TUNING


def _needed(metavar: str | None = None, **takes: Any) -> dict[str, Any]:
    return {"required": True, "metavar": metavar, **takes}


def _of(kind: Callable[[str], Any] | None, metavar: str | None = None, **takes: Any) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, **takes}


def _one_of(*choices: str) -> dict[str, Any]:
    return {"choices": choices}


def _ignored(name: str) -> Flag:
    return Flag(name, "no effect in the standalone host", False)


def _one(name: str) -> Flag:
    return Flag(name, "a DiT is trained data-parallel only", 1, {"type": int, "choices": (1,)})


def _load_base_model(group: Any) -> None:
    group.add_argument("--load-base-model", dest="init_from", metavar="WEIGHTS", help="another name of --init-from")


BOTH: tuple[Host, ...] = ("megatron", "native")
NAMES: Mapping[Host, str] = {"megatron": "MindSpeed-MM", "native": "MindSpeed-MM's native engine"}

MEGATRON: Mapping[str, tuple[Flag | AddFlags, ...]] = {
    "what to train": (
        Flag("mm_model", "model.json: predictor, diffusion, ae", takes=_needed("JSON"),
             native="model.mm_model", added_key=True),
        Flag("mm_data", "data.json: images and how to read them", takes=_needed("JSON"),
             native="data.dataset_param.mm_data", added_key=True),
        Flag("mm_tool", "tools.json of MindSpeed-MM; the real host wants it", takes=_of(None, "JSON")),
        Flag("ai_framework", "framework that does the work", "pytorch", _one_of("pytorch", "mindspore"),
             refused_in=("native",), refusal="runs on PyTorch", cure="use pytorch, or --host standalone"),
    ),
    "batches and length": (
        Flag("micro_batch_size", "images in one forward pass on one rank; default: global batch / ranks",
             takes=_of(positive_int, "N"), native="training.micro_batch_size"),
        Flag("global_batch_size", "images in one optimizer step on all ranks; default: micro batch x ranks. "
             "One of the two is needed",
             takes=_of(positive_int, "N"), native_counts="training.gradient_accumulation_steps", compared="fact"),
        Flag("context_parallel_size", "ranks that share the tokens of a clip, and its heads while they attend "
             "(Ulysses); default 1", 1, _of(positive_int, "N"), refused_in=("native",),
             refusal="does not let ranks share samples of a DiT", cure="use 1, or --host standalone"),
        Flag("train_iters", "optimizer steps", takes=_needed("N", type=positive_int), native="training.train_iters"),
        Flag("seed", "decides weights, sample order and every random draw", 1234, _of(unsigned_int),
             native="training.seed", compared="fact"),
        Flag("num_workers", "threads that prepare batches ahead; 0: in the training thread", 2, _of(threads),
             native="data.dataset_param.num_workers", added_key=True),
    ),
    "optimizer": (
        Flag("lr", "highest learning rate", takes=_needed(type=positive_float), native="training.lr",
             compared="setting"),
        Flag("min_lr", "learning rate at the end of the decay", 0.0, _of(float), native="training.lr_min"),
        Flag("lr_decay_style", None, "linear", _one_of("constant", "linear", "cosine", "inverse-square-root"),
             native="training.lr_decay_style", compared="setting"),
        Flag("lr_decay_iters", "steps until --min-lr is reached; default: --train-iters",
             takes=_of(positive_int, "N"), native_counts="training.lr_decay_ratio"),
        Flag("lr_warmup_iters", "steps of linear warm-up", 0, _of(unsigned_int, "N"),
             native_counts="training.lr_warmup_ratio", compared="setting"),
        Flag("lr_warmup_init", "learning rate the warm-up starts from", 0.0, _of(float), native="training.lr_start",
             compared="setting"),
        OPTIMIZER,
        optimizer_settings,
        Flag("weight_decay", "decoupled decay; not applied to biases and other vectors", 0.01, _of(float),
             native="training.weight_decay", compared="setting"),
        Flag("clip_grad", "largest gradient norm; 0: no clipping", 1.0, _of(float), native="training.clip_grad",
             compared="setting"),
        Flag("bf16", "compute in bfloat16, keep weights in float32", False, native="model.bf16", added_key=True),
    ),
    "fine-tuning": (*TUNING, _load_base_model),
    "distribution": (
        Flag("distributed_backend", "default: what the device wants (gloo on CPU, nccl on CUDA, hccl on NPU)",
             takes=_one_of("gloo", "nccl", "hccl"), idle_in=("native",)),
        Flag("use_torch_fsdp2", "shard the model by --fsdp2-config-path; without it every rank holds all", False),
        Flag("fsdp2_config_path", "fsdp2.yaml; without it MindSpeed-MM's defaults", takes=_of(None, "YAML")),
    ),
    "saving and logging": (
        Flag("save", "folder of the checkpoints", takes=_of(None, "DIR"), native="training.save", when_quiet=False),
        Flag("load", "folder to resume from; an empty or missing one starts anew", takes=_of(None, "DIR"),
             native="training.load", when_quiet=False),
        Flag("ckpt_format", None, "torch_dcp", _one_of("torch_dcp")),
        Flag("save_interval", "steps between checkpoints; default: at the end only", takes=_of(positive_int, "N"),
             native_counts="training.save_interval"),
        Flag("eval_interval", "steps between validations, of dataset_param.valid_fraction",
             takes=_of(positive_int, "N"), native_counts="training.val_interval"),
        Flag("eval_iters", "global batches in one validation; 0: none", 10, _of(batches, "N"),
             native="data.dataset_param.eval_iters", added_key=True),
        Flag("exit_duration_in_mins", "save and end after this many minutes", takes=_of(positive_int, "N"),
             idle_in=("native",), when_quiet=False),
        Flag("save_retain_interval", "keep the checkpoints of every N-th step for good, beside those of --keep-last",
             takes=_of(positive_int, "N"), idle_in=("native",), needs=("save", "save_interval")),
        Flag("log_interval", "steps between log lines", 1, _of(positive_int, "N"), native="training.log_interval"),
        Flag("profile", "write a trace of some steps (torch.profiler, or MindSpore's)", False, idle_in=("native",),
             when_quiet=False),
        Flag("profile_step_start", "steps taken before the trace begins", 10, _of(unsigned_int, "N")),
        Flag("profile_step_end", "steps taken at its end", 12, _of(positive_int, "N")),
        Flag("profile_ranks", "of which ranks; default: all", [], _of(unsigned_int, "RANK", nargs="+")),
        Flag("no_load_optim", "do not load the optimizer's state", False, native="training.no_load_optim"),
        Flag("no_save_optim", "do not save the optimizer's state", False, native="training.no_save_optim"),
    ),
    "accepted, for scripts written for Megatron-LM": (
        _ignored("no_gradient_accumulation_fusion"),
        _ignored("untie_embeddings_and_output_weights"),
        _ignored("use_mcore_models"),
        _ignored("no_save_rng"),
        _ignored("no_load_rng"),
        _ignored("no_masked_softmax_fusion"),
        _ignored("no_bias_gelu_fusion"),
        _ignored("no_async_tensor_model_parallel_allreduce"),
        _one("tensor_model_parallel_size"),
        _one("pipeline_model_parallel_size"),
        _one("expert_model_parallel_size"),
    ),
}  # fmt: skip
"""Megatron's flags with Megatron's meaning, by the group of --help: those that the standalone host understands."""

OWN: tuple[Flag, ...] = (
    Flag("host", "what runs the training: standalone, mindspeed-mm, mindspeed-mm-native (its FSDP2 engine) or a "
         "plugin's; auto: the real MindSpeed-MM where it is installed", "auto", when_quiet=False),
    Flag("init_from", "begin with weights of the same kind of network, in any format, of other classes or another "
         "size; a checkpoint in --load comes first", takes=_of(None, "WEIGHTS"), refused_in=BOTH,
         refusal="begins with weights of the seed alone",
         cure="begin with --host standalone --train-iters 1 --save NEW, then go on here with --load NEW"),
    Flag("init_verbose", "say of each tensor what --init-from made of it", False, idle_in=BOTH, needs=("init_from",)),
    Flag("dry_run", "check everything, say what would be trained, and end with code 0", False, refused_in=("native",),
         refusal="checks while it begins to train",
         cure="use --host standalone --dry-run, which looks at the same files"),
    Flag("ema_decay", "decay of the moving average of the weights that samples are drawn from", 0.9999, _of(fraction),
         native="model.ema_decay", added_key=True, compared="fact"),
    Flag("power_ema_stds", "also keep averages over a share of the run (Karras et al. 2024), one for each width, "
         "0.05 0.1 as published; mm-dit ema makes any other width of them afterwards. Each takes the memory of the "
         "weights", (), _of(std, "STD", nargs="+"), refused_in=BOTH, refusal="keeps the plain average alone"),
    Flag("pynative", "MindSpore: run operator by operator instead of compiling the step", False, idle_in=BOTH),
    Flag("tf32", "let float32 products round their inputs to TensorFloat-32 (NVIDIA GPUs, PyTorch): faster, and off "
         "by about 1e-3; facebookresearch/DiT trains so", False, idle_in=BOTH),
    Flag("torch_compile", "compile the transformer blocks (PyTorch): faster steps after a minute or so of compiling",
         False, idle_in=BOTH),
    Flag("peak_tflops", "peak of one device, for the MFU in TensorBoard and the progress bar; default: from a table, "
         "if known", takes=_of(positive_float, "TFLOPS"), idle_in=BOTH),
    Flag("keep_last", "checkpoints to keep", 2, _of(positive_int, "N"), idle_in=BOTH),
    Flag("keep_best", "save whenever a validation finds a smaller loss than all before, and keep the last of these: "
         "DIR/best", False, idle_in=BOTH, when_quiet=False),
    Flag("no_async_save", "write checkpoints in the training thread", False, idle_in=BOTH),
    Flag("report", "at the end draw samples.png and, of what --tensorboard-dir keeps, loss.png beside the checkpoint "
         "folder, where that takes no longer than the training did; always: however long it takes",
         takes={"nargs": "?", "const": "short", "choices": ["short", "always"]}, when_quiet=False),
    Flag("sample_interval", "steps between grids of samples, of the same noise and classes, by the moving average; "
         "0: none", 0, _of(unsigned_int, "N"), idle_in=BOTH, when_quiet=False),
    Flag("report_sampler", "sampler of the report; default: the quick one of what is learned",
         takes=_of(None, "NAME")),
    Flag("report_steps", "sampling steps of the report", 50, _of(positive_int)),
    Flag("report_cfg_scale", "guidance scale of the report and of --sample-interval", 2.0, _of(finite_float)),
)  # fmt: skip
"""This project's own flags, which the real host's parser is given as well."""


def rows() -> list[Flag]:
    """Return all rows, in the order of --help."""
    return [row for group in (*MEGATRON.values(), OWN) for row in group if isinstance(row, Flag)]
