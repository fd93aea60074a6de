"""Translate the flags and files of every host to keys of the engine's yaml, and back. Needs no framework.

Sections ``parallel``, ``training``, ``features`` and ``tools`` are the engine's; we add keys to ``model`` and ``data``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mindspeed_mm_dit.configs.flag import rows_of
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.host_flags import refuse
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.configs.tuning import without_lists
from mindspeed_mm_dit.configs.tuning_flags import FineTuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.optimizers.registry import settings as optimizer_settings

MODEL_ID = DATA_ID = COLLATOR_ID = "mindspeed_mm_dit"
PLUGIN = "mindspeed_mm_dit.hosts.native"
HF = "hf"
"""The engine's name for Hugging Face's format; for a DiT that is a diffusers folder."""
NO_CONFIG = "./none"
"""Where the engine looks for a configuration of transformers; it would look up a plain name on the network."""

_KNOWN = {name: f"training.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps", "muon_momentum")}
_KNOWN["muon_num_ns_steps"] = "training.ns_steps"
"""Setting of an optimizer -> the engine's key of the same meaning; for other settings we add a key."""
_ADDED = {name: f"training.{name}" for name in optimizer_settings() if name not in _KNOWN}

FLAGS = {
    **{row.native: row.name for row in rows() if row.native},
    **{key: name for name, key in (_KNOWN | _ADDED).items()},
    "tools.tensorboard_dir": "tensorboard_dir",
}
"""Key of the yaml -> flag that means the same."""

CALLED = {"training.optimizer": {"adam": "adamw"}}
"""Key -> value of the flag -> the engine's name for the value, if it differs."""

_PATTERNS = ("model.freeze", "training.lora.target_modules")

COUNTED = {row.native_counts: row.name for row in rows() if row.native_counts}
"""Key of the yaml -> flag that is computed from it in other units."""

OURS = {
    **{row.native: row.default for row in rows() if row.added_key},
    **{key: optimizer_settings()[name][0].default for name, key in _ADDED.items()},
    "training.keep_last": None,  # keep all, as the engine does
    "tools.tensorboard_dir": None,
}
"""Keys that the engine does not know, with their defaults."""

THEIRS = {
    "parallel.fsdp_plan.cast_forward_inputs": True,
    "parallel.fsdp_plan.reshard_after_forward": True,
    "parallel.fsdp_plan.num_to_forward_prefetch": 0,
    "parallel.fsdp_plan.num_to_backward_prefetch": 0,
    "parallel.fsdp_plan.cpu_offload": False,
    "training.lr_min": 0.0,
    "training.lr_start": 0.0,
    "training.lr_decay_style": "constant",
    "training.lr_decay_ratio": 1.0,
    "training.lr_warmup_ratio": 0.0,
    "training.adam_beta1": 0.9,
    "training.adam_beta2": 0.999,
    "training.adam_eps": 1e-8,
    "training.weight_decay": 0.0,
    "training.log_interval": 1,
    "training.no_load_optim": False,
    "training.save_async": False,
    "training.no_save_optim": False,
    "training.val_interval": 0,
    "training.optimizer": "adamw",
    "training.muon_momentum": 0.95,
    "training.lora.rank": 8,
    "training.lora.alpha": 16,
    "training.lora.dropout": 0.0,
    "training.ns_steps": 5,
    "parallel.ulysses_parallel_size": 1,
}
"""Defaults of the engine; we leave them out of a yaml that we write."""

REQUIRED = ("model.mm_model", "data.dataset_param.mm_data")

_ALIKE = (
    *("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "reshard_after_forward"),
    *("num_to_forward_prefetch", "num_to_backward_prefetch"),
)
SHARDING = {**{name: name for name in _ALIKE}, "cpu_offload": "offload_to_cpu"}
"""Key of parallel.fsdp_plan -> key of fsdp2.yaml that means the same."""

ROOT = "predictor."
"""Prefix of paths in fsdp2.yaml; the engine's model is the predictor itself."""


def flags_of(read: Any, lookup: Any) -> dict[str, Any]:
    """Return the flags, by name, that mean the same as the engine's arguments; ``lookup(read, key)`` reads one key."""
    training = read.training
    defaults = {} if training.lora.enable else {row.name: row.default for row in rows_of(FineTuning)}
    keys = {key: flag for key, flag in FLAGS.items() if not (defaults and key.startswith("training.lora."))}
    return {
        **defaults,
        **{flag: _as_flag(key, lookup(read, key)) for key, flag in keys.items()},
        "global_batch_size": training.global_batch_size,
        "save_interval": training.save_interval or None,
        "eval_interval": training.val_interval or None,
        "lr_warmup_iters": int(training.train_iters * training.lr_warmup_ratio),
        "lr_decay_iters": max(int(training.train_iters * training.lr_decay_ratio), int(training.lr_decay_ratio > 0)),
        "no_async_save": not training.save_async,
    }


def _as_flag(key: str, value: Any) -> Any:
    """Return a value of the yaml as the value of the flag with the same meaning."""
    return next((flag for flag, called in CALLED.get(key, {}).items() if called == value), value)


def yaml_of(flags: RunConfig, fsdp2: Fsdp2Config | None, world_size: int) -> dict[str, Any]:
    """Return the engine's yaml for ``flags`` and fsdp2.yaml (None: every rank holds all weights).

    Raises:
        ConfigError: the engine does not support the value of a flag.
    """
    check_schedule(flags)
    refuse(flags, "native", resumes=flags.load is not None)
    content: dict[str, Any] = {name: {} for name in ("parallel", "model", "data", "features", "training", "tools")}
    _shard(content, fsdp2, world_size)
    put(content, "model.model_id", MODEL_ID)
    put(content, "model.model_name_or_path", NO_CONFIG)
    put(content, "data.dataset_param.dataset_type", DATA_ID)
    loader = {"dataloader_mode": "base", "sampler_type": "none", "shuffle": False, "drop_last": True}
    loader |= {"pin_memory": False, "num_workers": 0, "collate_param": {"collator_id": COLLATOR_ID}}
    put(content, "data.dataloader_param", loader)
    put(content, "training.plugin", [PLUGIN])
    if flags.mm_valid_data:
        put(content, "data.val_dataset_param.dataset_type", DATA_ID)
    values = flags.flags()
    for key, flag in FLAGS.items():
        value = CALLED[key].get(values[flag], values[flag]) if key in CALLED else values[flag]
        value = without_lists(value) if key in _PATTERNS else value
        if value not in (None, (), []) and (key != "model.bf16" or fsdp2 is None):  # (fsdp2.yaml has set it)
            put(content, key, value)
    groups = world_size // flags.context_parallel_size  # data-parallel groups
    micro_batches = flags.global_batch_size // flags.micro_batch_size // groups
    put(content, "training.gradient_accumulation_steps", micro_batches)
    if flags.lora_target_modules:
        put(content, "training.lora.enable", True)
    put(content, "training.lr_warmup_ratio", _ratio(flags.lr_warmup_iters, flags.train_iters))
    put(content, "training.lr_decay_ratio", _ratio(flags.lr_decay_iters or flags.train_iters, flags.train_iters))
    put(content, "training.save_interval", flags.save_interval or 0)
    put(content, "training.save_async", not flags.no_async_save)
    put(content, "training.val_interval", flags.eval_interval or 0)
    return content


def check_schedule(flags: RunConfig) -> None:
    """Raise ConfigError for a learning rate schedule that the engine does not have."""
    if flags.lr_decay_style == "inverse-square-root":
        raise ConfigError(
            "--lr-decay-style = inverse-square-root",
            "MindSpeed-MM's native engine does not have it",
            "use constant, linear or cosine, or another --host",
        )
    if flags.lr_decay_style == "linear" and (flags.min_lr or (flags.lr_decay_iters or 0) not in (0, flags.train_iters)):
        raise ConfigError(
            "--lr-decay-style = linear",
            "MindSpeed-MM's native engine lets it end at 0, after --train-iters",
            "drop --min-lr and --lr-decay-iters, or use --lr-decay-style cosine",
        )


def _ratio(steps: int, total: int) -> float:
    """Return a ratio such that ``int(of * ratio)`` gives ``steps``; 0 and 1 are returned exactly."""
    return steps / total if steps in (0, total) else (steps + 0.5) / total


def _shard(content: dict[str, Any], fsdp2: Fsdp2Config | None, world_size: int) -> None:
    """Write the engine's keys for the settings of fsdp2.yaml; None: every rank holds all weights (the engine's DDP)."""
    put(content, "parallel.fully_shard_parallel_size", (fsdp2.sharding_size or 1) if fsdp2 else 1)
    if fsdp2 is None:
        return
    put(content, "parallel.fsdp_plan.apply_modules", patterns(fsdp2.sub_modules_to_wrap))
    if fsdp2.ignored:
        put(content, "parallel.fsdp_plan.ignored_modules", patterns(fsdp2.ignored))
    if type(fsdp2.reshard_after_forward) is int:
        raise ConfigError(
            f"fsdp2.yaml: reshard_after_forward = {fsdp2.reshard_after_forward}",
            "MindSpeed-MM's native engine knows true and false only",
            "use one of them",
        )
    for key, name in SHARDING.items():
        if (value := getattr(fsdp2, name)) is not None:
            put(content, f"parallel.fsdp_plan.{key}", value)
    if fsdp2.recompute_modules:
        put(content, "features.recompute", True)
        put(content, "features.recompute_plan.apply_modules", patterns(fsdp2.recompute_modules))
        put(content, "features.recompute_plan.use_reentrant", fsdp2.use_reentrant)
    if fsdp2.shard_ranks(world_size) == 1 and fsdp2.param_dtype not in (None, "fp32"):
        put(content, "training.init_model_with_meta_device", True)  # (otherwise the weights themselves get that dtype)


def fsdp2_of(read: Any) -> Fsdp2Config | None:
    """Return the engine's sharding arguments as the settings of fsdp2.yaml; None for its DDP."""
    parallel, plan = read.parallel, read.parallel.fsdp_plan
    if parallel.fully_shard_parallel_size == 1 and not read.training.init_model_with_meta_device:
        return None
    known = {name: getattr(plan, key) for key, name in SHARDING.items()}
    config = Fsdp2Config(**known, sharding_size=parallel.fully_shard_parallel_size)
    recomputed_modules = tuple(f"{ROOT}{pattern}" for pattern in recomputed(read))
    use_reentrant = read.features.recompute_plan.use_reentrant
    return replace(config, recompute_modules=recomputed_modules or None, use_reentrant=use_reentrant)


def recomputed(read: Any) -> list[str]:
    """Return the patterns of the modules whose activations are recomputed."""
    return list(read.features.recompute_plan.apply_modules) if getattr(read.features, "recompute", False) else []


def patterns(paths: Iterable[str]) -> list[str]:
    """Return paths of fsdp2.yaml in the engine's form: relative to the predictor, without lists in braces."""
    # (the whole predictor is the root, which is always wrapped)
    return [path.removeprefix(ROOT) for path in without_lists(paths) if path.startswith(ROOT)]


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of nested mappings, unless ``value`` is its default."""
    if {**OURS, **THEIRS}.get(key, put) == value:
        return
    *path, leaf = key.split(".")
    for part in path:
        content = content.setdefault(part, {})
    content[leaf] = value


def get(content: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key of nested mappings; None if there is none."""
    value: Any = content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def lookup(read: Any, key: str) -> Any:
    """Return the value of a dotted key of the engine's arguments; for a key of ours that is absent, its default."""
    *path, leaf = key.split(".")
    for part in path:
        read = getattr(read, part)
    return getattr(read, leaf, None) if key not in OURS else getattr(read, leaf, OURS[key])
