"""What each flag of a run means inside MindSpeed-MM, in each of its two routes: one row a flag, complete by test.

Flags of optimizers and metrics loggers are not here: ``native/settings.py`` has their keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from mindspeed_mm_dit.configs.flag import rows_of
from mindspeed_mm_dit.configs.run import IgnoredArgs, RunConfig, rows
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.optimizers.registry import is_class

Route = Literal["megatron", "native"]
HOST_NAMES: Mapping[Route, str] = {"megatron": "MindSpeed-MM", "native": "MindSpeed-MM's native engine"}


class Key(NamedTuple):
    """The flag is a key of the native engine's yaml."""

    name: str
    is_added: bool = False
    """Whether the engine has no such key: we add it, with the flag's default."""
    is_computed: bool = False
    """Whether the key has other units, so that its value is computed from the flag."""


class Unsupported(NamedTuple):
    """The route does otherwise, so every value but the default is an error."""

    does: str
    """What the route does; the text follows its name."""
    advice: str = "Leave it out, or use --host standalone."
    """What to do, a sentence."""


SAME: Literal["same"] = "same"
"""The flag has the meaning that it has in the standalone host."""
IGNORED: Literal["ignored"] = "ignored"
"""The flag is accepted, has no effect, and a note says so."""


class Meaning(NamedTuple):
    """What a flag means in each route."""

    megatron: Literal["same", "ignored"] | Unsupported
    native: Literal["same", "ignored"] | Unsupported | Key


def _same(key: str, *, is_added: bool = False, is_computed: bool = False) -> Meaning:
    return Meaning(SAME, Key(key, is_added, is_computed))


_STANDALONE_ONLY = Meaning(IGNORED, IGNORED)
_WHOLE_NETWORK = Unsupported(
    "trains the whole network in its Megatron engine", "Use --host mindspeed-mm-native, or --host standalone."
)

FLAGS: Mapping[str, Meaning] = {
    # model, data and framework
    "mm_model": _same("model.mm_model", is_added=True),
    "mm_data": _same("data.dataset_param.mm_data", is_added=True),
    "timestep_window": Meaning(SAME, Unsupported("takes it from model.json", "Set diffusion.timestep_window there.")),
    "ai_framework": Meaning(SAME, Unsupported("runs on PyTorch", "Use pytorch, or --host standalone.")),
    # batches and length
    "micro_batch_size": _same("training.micro_batch_size"),
    "global_batch_size": _same("training.gradient_accumulation_steps", is_computed=True),
    "context_parallel_size": _same("parallel.ulysses_parallel_size"),
    "train_iters": _same("training.train_iters"),
    "seed": _same("training.seed"),
    "num_workers": _same("data.dataset_param.num_workers", is_added=True),
    # optimization
    "lr": _same("training.lr"),
    "min_lr": _same("training.lr_min"),
    "lr_decay_style": _same("training.lr_decay_style"),
    "lr_decay_iters": _same("training.lr_decay_ratio", is_computed=True),
    "lr_warmup_iters": _same("training.lr_warmup_ratio", is_computed=True),
    "lr_warmup_init": _same("training.lr_start"),
    "optimizer": Meaning(Unsupported("can continue with AdamW's moments only"), Key("training.optimizer")),
    "weight_decay": _same("training.weight_decay"),
    "clip_grad": _same("training.clip_grad"),
    "bf16": _same("model.bf16", is_added=True),
    # fine-tuning
    "lora_target_modules": Meaning(_WHOLE_NETWORK, Key("training.lora.target_modules")),
    "lora_r": _same("training.lora.rank"),
    "lora_alpha": _same("training.lora.alpha"),
    "lora_dropout": _same("training.lora.dropout"),
    "freeze": Meaning(_WHOLE_NETWORK, Key("model.freeze")),
    "offload_blocks": Meaning(
        Unsupported("trains the whole network in its Megatron engine"),
        Unsupported("offloads by its own settings"),
    ),
    "base_dtype": Meaning(
        _WHOLE_NETWORK,
        Unsupported("has settings of its own for a base in few bits"),
    ),
    # distribution
    "distributed_backend": Meaning(SAME, IGNORED),
    # checkpoints, validation and logging
    "save": _same("training.save"),
    "load": _same("training.load"),
    "save_interval": _same("training.save_interval", is_computed=True),
    "eval_interval": _same("training.val_interval", is_computed=True),
    "eval_iters": _same("data.dataset_param.eval_iters", is_added=True),
    "exit_duration_in_mins": _same("training.exit_duration_in_mins", is_added=True),
    "save_retain_interval": _same("training.save_retain_interval", is_added=True),
    "log_interval": _same("training.log_interval"),
    "profile": Meaning(SAME, IGNORED),
    "no_load_optim": _same("training.no_load_optim"),
    "no_save_optim": _same("training.no_save_optim"),
    # this project's own
    "init_from": Meaning(
        Unsupported(
            "can only start from random weights",
            "Start with --host standalone --train-iters 1 --save NEW, then continue here with --load NEW.",
        ),
        Key("model.init_from", is_added=True),
    ),
    "mm_valid_data": Meaning(
        Unsupported(
            "validates on the samples that --mm-data holds out", "Set valid_fraction there, or use --host standalone."
        ),
        Key("data.val_dataset_param.mm_data", is_added=True),
    ),
    "loss_by": _same("model.loss_by", is_added=True),
    "init_verbose": _STANDALONE_ONLY,
    "dry_run": Meaning(
        SAME,
        Unsupported(
            "checks only when training starts", "Use --host standalone --dry-run, which checks the same files."
        ),
    ),
    "ema_decay": _same("model.ema_decay", is_added=True),
    "power_ema_stds": Meaning(Unsupported("keeps the plain EMA only"), Unsupported("keeps the plain EMA only")),
    "pynative": _STANDALONE_ONLY,
    "tf32": _STANDALONE_ONLY,
    "torch_compile": _STANDALONE_ONLY,
    "peak_tflops": _STANDALONE_ONLY,
    "keep_last": Meaning(IGNORED, Key("training.keep_last", is_added=True)),
    "keep_best": _STANDALONE_ONLY,
    "no_async_save": Meaning(IGNORED, SAME),
    "sample_interval": _STANDALONE_ONLY,
    # flags with the same meaning in all hosts, or translated with others (``--use-torch-fsdp2``)
    **dict.fromkeys((row.name for row in rows_of(IgnoredArgs)), Meaning(SAME, SAME)),
    **dict.fromkeys(("mm_tool", "use_torch_fsdp2", "fsdp2_config_path", "ckpt_format"), Meaning(SAME, SAME)),
    **dict.fromkeys(("profile_step_start", "profile_step_end", "profile_ranks"), Meaning(SAME, SAME)),
    **dict.fromkeys(("host", "report", "sample_prompts", "report_sampler"), Meaning(SAME, SAME)),
    **dict.fromkeys(("report_steps", "report_cfg_scale"), Meaning(SAME, SAME)),
}


def native_keys() -> dict[str, Key]:
    """Return the key of each flag that has one in the native engine's yaml, by flag."""
    return {name: meaning.native for name, meaning in FLAGS.items() if isinstance(meaning.native, Key)}


def ignored_by(route: Route) -> list[str]:
    """Return the flags that have no effect in ``route``."""
    return [name for name, meaning in FLAGS.items() if getattr(meaning, route) == IGNORED]


def check_supported(args: RunConfig, route: Route, resumes: bool) -> None:
    """Raise ConfigError for a flag that ``route`` cannot follow.

    ``resumes``: the run resumes from a checkpoint, so ``--init-from`` does not matter.
    """
    if is_class(args.optimizer):
        raise ConfigError(
            f"--optimizer = {args.optimizer} is not supported: {HOST_NAMES[route]} keeps the state of "
            f"{'AdamW and Muon' if route == 'native' else 'AdamW'} only. Use such an optimizer, or --host standalone."
        )
    for row in rows():
        meaning, value = getattr(FLAGS[row.name], route), getattr(args, row.name)
        if (
            not isinstance(meaning, Unsupported)
            or value in (row.default, None)
            or (resumes and row.name == "init_from")
        ):
            continue
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        setting = row.word if value is True else f"{row.word} = {text}"
        raise ConfigError(f"{setting} is not supported: {HOST_NAMES[route]} {meaning.does}. {meaning.advice}")
