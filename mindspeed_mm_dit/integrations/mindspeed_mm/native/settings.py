"""Translate the flags of every host to keys of the engine's yaml and back, and find errors that the engine accepts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.arguments import checked
from mindspeed_mm_dit.configs.files import read_yaml
from mindspeed_mm_dit.configs.flag import positive_int, rows_of, unsigned_int
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.configs.tuning import FineTuning, expand_lists
from mindspeed_mm_dit.errors import ConfigError, flag_of, nearest
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import check_supported, native_keys
from mindspeed_mm_dit.optimizers.registry import settings as optimizer_settings
from mindspeed_mm_dit.training.flags import full_parser

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

_KEYS = native_keys()
FLAGS = {
    **{key.name: flag for flag, key in _KEYS.items() if not key.is_computed},
    **{key: name for name, key in (_KNOWN | _ADDED).items()},
    "tools.tensorboard_dir": "tensorboard_dir",
}
"""Key of the yaml -> flag that means the same."""

CALLED = {"training.optimizer": {"adam": "adamw"}}
"""Key -> value of the flag -> the engine's name for the value, if it differs."""

_PATTERNS = ("model.freeze", "training.lora.target_modules")

COUNTED = {key.name: flag for flag, key in _KEYS.items() if key.is_computed}
"""Key of the yaml -> flag that is computed from it in other units."""

_DEFAULTS = {
    **{row.name: row.default for row in rows()},
    **{name: setting.default for name, (setting, _) in optimizer_settings().items()},
}
"""Flag -> its default."""

OURS = {
    **{key.name: _DEFAULTS[flag] for flag, key in _KEYS.items() if key.is_added},
    **{key: _DEFAULTS[name] for name, key in _ADDED.items()},
    "training.keep_last": None,  # keep all, as the engine does
    "tools.tensorboard_dir": None,
}
"""Keys that the engine does not know, with their defaults."""

REQUIRED = ("model.mm_model", "data.dataset_param.mm_data")

_ALIKE = (
    *("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "reshard_after_forward"),
    *("num_to_forward_prefetch", "num_to_backward_prefetch"),
)
SHARDING = {**{name: name for name in _ALIKE}, "cpu_offload": "offload_to_cpu"}
"""Key of parallel.fsdp_plan -> key of fsdp2.yaml that means the same."""

THEIRS = {
    **{
        key: CALLED.get(key, {}).get(_DEFAULTS[flag], _DEFAULTS[flag]) for key, flag in FLAGS.items() if key not in OURS
    },
    **{f"parallel.fsdp_plan.{key}": getattr(Fsdp2Config(), name) for key, name in SHARDING.items()},
    "training.seed": 42,
    "training.lr_decay_style": "constant",
    "training.lr_decay_ratio": 1.0,
    "training.lr_warmup_ratio": 0.0,
    "training.weight_decay": 0.0,
    "training.save_async": False,
    "training.val_interval": 0,
}
"""Defaults of the engine, most of which are those of our flags; we leave them out of a yaml that we write."""

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
    check_supported(flags, "native", resumes=flags.load is not None)
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
        value = expand_lists(value) if key in _PATTERNS else value
        if value not in (None, (), []) and (key != "model.bf16" or fsdp2 is None):  # (fsdp2.yaml has set it)
            put(content, key, value)
    groups = world_size // flags.context_parallel_size  # data-parallel groups
    put(content, "training.gradient_accumulation_steps", flags.global_batch_size // flags.micro_batch_size // groups)
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
            "--lr-decay-style = inverse-square-root is not in MindSpeed-MM's native engine. Use constant, linear or "
            "cosine, or another --host."
        )
    if flags.lr_decay_style == "linear" and (flags.min_lr or (flags.lr_decay_iters or 0) not in (0, flags.train_iters)):
        raise ConfigError(
            "--lr-decay-style = linear always ends at 0 after --train-iters in MindSpeed-MM's native engine. Drop "
            "--min-lr and --lr-decay-iters, or use --lr-decay-style cosine."
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
            f"fsdp2.yaml: reshard_after_forward = {fsdp2.reshard_after_forward} must be true or false for "
            "MindSpeed-MM's native engine."
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
    return [path.removeprefix(ROOT) for path in expand_lists(paths) if path.startswith(ROOT)]


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


SHARDS = "parallel.fully_shard_parallel_size"
NOT_DECLARED = ("features.recompute", "inference")
"""Keys that the engine reads but does not declare."""
OPEN = ("parallel.tp_plan", "parallel.ep_plan", "data.dataset_param.attr", "inference", "training.quantization_plan")
"""Sections that are not checked: a DiT has no use for them."""
_IDS = {
    "model.model_id": MODEL_ID,
    "data.dataset_param.dataset_type": DATA_ID,
    "data.dataloader_param.collate_param.collator_id": COLLATOR_ID,
    "training.plugin": PLUGIN,
}
"""Key -> the name under which we are registered with the engine; the last one is an entry of a list."""


def check_keys(path: str) -> None:
    """Raise ConfigError for an unknown key, a missing required key, or a wrong number of ranks."""
    from mindspeed_mm.fsdp.params.argument import Arguments

    content = read_yaml(path, "CONFIG")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must have the sections parallel, model, data, features, training and tools.")
    _check_section(content, Arguments, "", path)
    for key in REQUIRED:
        if not isinstance(get(content, key), str):
            raise ConfigError(f"{path}: {key} is missing. Name the JSON file, as --mm-model and --mm-data do.")
    for key, expected in _IDS.items():
        if (actual := get(content, key)) != expected and not (isinstance(actual, list) and expected in actual):
            raise ConfigError(f"{path}: {key} = {written(actual)} must name {expected}.")
    _check_ranks(get(content, SHARDS), framework.runtime.world_size(), path)


def _check_section(content: dict[str, Any], section: Any, prefix: str, path: str) -> None:
    known = {name: field.annotation for name, field in section.model_fields.items()}
    ours = [key.removeprefix(prefix) for key in (*OURS, *NOT_DECLARED) if key.startswith(prefix)]
    for name, value in content.items():
        key = f"{prefix}{name}"
        if name not in known and name not in ours:
            raise ConfigError(
                f"{path}: {key} = {shorten_repr(value)} is an unknown key. {nearest(str(name), [*known, *ours])}"
            )
        kind = known.get(name)
        if not hasattr(kind, "model_fields") or key in OPEN:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key} = {written(value)} must be a section. Write {name}: {{}}.")
        _check_section(value, kind, f"{key}.", path)


def _check_ranks(size: Any, ranks: int, path: str) -> None:
    """Raise ConfigError unless ``ranks`` can be divided into copies of the weights on ``size`` ranks each."""
    if size is None or size == "auto":
        return
    if not str(size).isdecimal() or not int(size) or ranks % int(size):
        raise ConfigError(
            f"{path}: {SHARDS} = {shorten_repr(size)} must be auto or a divisor of the {ranks} rank(s) (torchrun "
            "--nproc_per_node)."
        )


def refused(path: str, error: BaseException) -> ConfigError:
    """Return our error for the engine's ``error`` about a yaml with valid keys: a value that it does not accept."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        if str(error).startswith("Command-line"):  # (training.lr=1e-4 after the yaml)
            return ConfigError(
                f"MindSpeed-MM's native engine does not take the command line: {error}. Write the setting into {path}."
            )
        return ConfigError(f"MindSpeed-MM's native engine does not take {path}: {error}.")
    problem = error.errors()[0]
    key, value, message = _key(problem["loc"]), problem["input"], problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return ConfigError(f"{path}: {key} is missing. Run mm-dit plan --write-native for a complete yaml.")
    setting = key if isinstance(value, dict) else f"{key} = {written(value)}"  # (a section: its values do not agree)
    advice = " Leave the key out." if value is None else ""
    return ConfigError(f"{path}: {setting} is not what MindSpeed-MM's native engine takes: {message}.{advice}")


def _key(parts: Sequence[str | int]) -> str:
    """Return a key as it is in the yaml: if a key may have several types, pydantic adds the type after it."""
    kinds = {"str", "int", "float", "bool"}
    return ".".join(str(part) for part in parts if part not in kinds)


def written(value: Any) -> str:
    """Return a value as it is written in a yaml."""
    return {"None": "null", "True": "true", "False": "false"}.get(text := shorten_repr(value), text)


def checked_values(values: Mapping[str, Any], path: str, world_size: int) -> RunConfig:
    """Return the run whose flags have ``values``, from the yaml ``path``, converted to the types of the command line.

    Raises:
        ConfigError: the flag of the same meaning would not accept the value; the key is named.
    """
    actions = {action.dest: action for action in full_parser()._actions}
    converted = {flag: _converted(f"{path}: {key}", values[flag], actions[flag]) for key, flag in FLAGS.items()}
    for key, flag in COUNTED.items():
        kind = unsigned_int if flag == "lr_warmup_iters" else _optional_int
        _typed(f"{path}: {key} ({flag_of(flag)})", values[flag], kind)
    try:
        flags = checked(RunConfig.of({**values, **converted}), world_size)
        check_schedule(flags)
        return flags
    except ConfigError as error:
        raise ConfigError(f"{path}: {_key_of_flag(str(error))}{error}") from None


def _converted(setting: str, value: Any, action: argparse.Action) -> Any:
    """Return ``value`` as the command line would read it."""
    if value is None and action.default in (None, ()):
        return action.default
    if action.nargs == "+":
        good = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
        wish = "a list of strings"
    elif action.nargs == 0:
        good, wish = isinstance(value, bool), "true or false"
    elif action.choices is not None:
        good, wish = value in action.choices, f"one of {', '.join(action.choices)}"
    elif action.type is None:
        good, wish = isinstance(value, str), "a text"
    else:
        assert callable(action.type)
        return _typed(setting, value, action.type)
    if not good:
        raise ConfigError(f"{setting} = {written(value)} must be {wish}.")
    return value


def _typed(setting: str, value: Any, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{setting} = {written(value)} {str(error).partition(', not ')[0]}.") from None


def _optional_int(text: str) -> Any:
    return None if text == "None" else positive_int(text)


def _key_of_flag(message: str) -> str:
    """Return "key: " for the key that means the same as the flag with which ``message`` begins; or ""."""
    flag = message.partition(" ")[0].removeprefix("--").replace("-", "_")
    return next((f"{key}: " for key, name in {**FLAGS, **COUNTED}.items() if name == flag), "")
