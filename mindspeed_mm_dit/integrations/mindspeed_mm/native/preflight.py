"""Checks before the engine builds anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_mm_dit.configs.fsdp2 import ComputeMode, Fsdp2Config
from mindspeed_mm_dit.configs.run import MultiModalArguments, RunConfig
from mindspeed_mm_dit.configs.tuning import run_tuning
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.hosts.preflight import check_configs, check_outputs, host_facts, log_data_set
from mindspeed_mm_dit.integrations.formats.families import FAMILIES
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import DATA_ID, HF, lookup, written
from mindspeed_mm_dit.models.meta import lora_specs, parameters_of
from mindspeed_mm_dit.models.registry import build_predictor
from mindspeed_mm_dit.training.loggers import boards
from mindspeed_mm_dit.training.loggers.registry import check_metrics_loggers
from mindspeed_mm_dit.training.pytorch.parallel import check_recompute
from mindspeed_mm_dit.training.resume import check_restorable

_DATA_PARALLEL = "must be 1, as a DiT is trained data-parallel only."
_DTYPES = ((None, "fp32", "bf16", "fp16"), "is no type that a DiT is trained in. Write bf16 or fp32.")
_NO_TOKENS = "is not supported, as a DiT predicts no tokens. Drop it."
_NO_EXPERTS = "is not supported, as a DiT has no experts. Drop it."
_NO_CHOICE = "is never read by the engine. Drop it: in every host matrices decay, and vectors do not."
SUPPORTED: Mapping[str, tuple[Collection[Any], str]] = {
    "parallel.ring_attention_size": ((1,), _DATA_PARALLEL),
    "parallel.expert_parallel_size": ((1,), _DATA_PARALLEL),
    "parallel.fsdp_plan.param_dtype": _DTYPES,
    "parallel.fsdp_plan.reduce_dtype": _DTYPES,
    "parallel.fsdp_plan.output_dtype": _DTYPES,
    "parallel.recompute": (
        (False,),
        "is never read by the engine. Write features.recompute and its recompute_plan.",
    ),
    "model.mtp_num_layers": ((0,), _NO_TOKENS),
    "features.loss_cfg.loss_type": (("raw",), "must be raw, as the model computes its loss itself."),
    "features.enable_chunk_loss": ((False,), _NO_TOKENS),
    "features.enable_dynamic_chunk_loss": ((False,), _NO_TOKENS),
    "training.lora.init_lora_weights": (
        (True,),
        "is not supported, as every host initialises adapters as peft does by default. Drop it.",
    ),
    "training.lora.pretrained_lora_path": (
        (None,),
        "is not supported, as adapters resume with their moments and EMA, so from a checkpoint. Write training.load, "
        "or begin with merged weights (mm-dit convert BASE NEW --merge-lora FILE).",
    ),
    "features.loss_cfg.router_aux_loss_coef": ((0.0,), _NO_EXPERTS),
    "features.enable_ep_balance": ((False,), _NO_EXPERTS),
    "features.skip_moe_pad_tokens": ((False,), _NO_EXPERTS),
    "features.enable_chunk_mbs": (
        (False,),
        "would cut the samples of a block's input and leave their conditions whole. Write a smaller "
        "training.micro_batch_size, and more gradient_accumulation_steps.",
    ),
    "training.quantization_plan.recipe_name": (
        (None,),
        "replaces PyTorch's layers and was never tested with the layers of a DiT. Drop it; "
        "parallel.fsdp_plan.param_dtype: bf16 computes in bfloat16.",
    ),
    "training.no_decay_modules": (([],), _NO_CHOICE),
    "training.no_decay_params": (([],), _NO_CHOICE),
    "training.max_steps": ((None,), "is never read by the engine. Write train_iters."),
    "training.save_steps": ((0,), "is never read by the engine. Write save_interval."),
    "training.load_checkpoint_path": ((None,), "is never read by the engine. Write load."),
    "training.enable_full_determinism": ((False,), "is never read by the engine. Write use_deter_comp."),
    "training.profile.enable": ((False,), "is never read by the engine. Write tools.profile."),
    "training.val_micro_batch_size": (
        (None,),
        "is not supported, as a validation takes micro-batches of training's size. Drop it.",
    ),
    "training.optimizer": (
        ("adamw", "muon"),
        "must be adamw or muon. To keep the moments in the machine's memory, write adamw and "
        "parallel.fsdp_plan.cpu_offload: true.",
    ),
    "training.matched_adamw_rms": ((0.2,), "must be 0.2, the scale of every host's Muon. Drop it."),
}
"""Settings of the engine that do not work as documented for a DiT: key -> supported values, what an error says."""


def check(read: Any, flags: RunConfig, fsdp2: Fsdp2Config | None) -> MultiModalArguments:
    """Check the engine's arguments ``read``, the ``flags`` made from them, and the config files; return the configs.

    Raises:
        UserError: whatever is wrong.
    """
    modes: tuple[ComputeMode, ...] = ("fsdp2",) if fsdp2 else ("autocast",)
    host = dataclasses.replace(
        host_facts(),
        name="MindSpeed-MM's native engine",
        has_context_parallel=True,
        bf16_modes=modes,
        check_sharding=lambda mm: _check_patterns(read, mm),
        mm_model="model.mm_model",
        mm_data="data.dataset_param.mm_data",
    )
    bf16 = flags.bf16 and fsdp2 is None  # (with FSDP2 the yaml's param_dtype decides)
    mm = check_configs(dataclasses.replace(flags, bf16=bf16), host, fsdp2, run_tuning(flags, flags.init_from))
    check_restorable(dataclasses.replace(flags, mm=mm))
    if read.training.save_format == HF and mm.model.predictor.model_id not in FAMILIES and not lora_specs(mm.model):
        raise ConfigError(
            f"training.save_format = hf is not possible, as diffusers has no {mm.model.predictor.model_id}. Drop it; "
            "mm-dit convert makes a .safetensors."
        )
    data = mm.data_set
    if flags.eval_interval and not data.num_valid:
        raise ConfigError(
            f"training.val_interval = {flags.eval_interval} has no {data.noun} to validate on, as "
            f"dataset_param.valid_fraction in data.json is {mm.data.dataset_param.valid_fraction}. Set valid_fraction, "
            "name a separate data.json (data.val_dataset_param), or drop the interval."
        )
    if host.rank == 0:
        check_outputs(flags)
        check_metrics_loggers(flags, [boards.TENSORBOARD])
        log_data_set(flags, mm)
    return mm


def check_offered(read: Any) -> None:
    """Raise ConfigError for settings of the engine that do not work as documented for a DiT."""
    parallel, training, loader = read.parallel, read.training, read.data.dataloader_param
    for key, (supported, problem) in SUPPORTED.items():
        if (value := lookup(read, key)) not in supported:
            raise ConfigError(f"{key} = {written(value)} {problem}")
    dtype = parallel.fsdp_plan.param_dtype
    if (
        parallel.fully_shard_parallel_size == 1
        and not training.init_model_with_meta_device
        and dtype not in (None, "fp32")
    ):
        raise ConfigError(
            f"parallel.fsdp_plan.param_dtype = {dtype} with fully_shard_parallel_size 1 makes weights, moments and "
            "average of this type. Drop it and write model.bf16: true, or write training.init_model_with_meta_device: "
            "true."
        )
    if loader.dataloader_mode != "base" or loader.num_workers:
        raise ConfigError(
            f"data.dataloader_param has dataloader_mode = {loader.dataloader_mode} and num_workers = "
            f"{loader.num_workers}, but our data set determines the order itself and has its own threads. Write base "
            "and 0; data.dataset_param.num_workers sets the threads."
        )
    if training.train_epochs is not None and not loader.drop_last:
        raise ConfigError("data.dataloader_param.drop_last = false must be true, as all batches here are complete.")
    if training.load_format == HF and not (training.load and training.no_load_optim and training.no_load_rng):
        raise ConfigError(
            "training.load_format = hf loads weights alone. Write training.load, no_load_optim: true and no_load_rng: "
            "true; or model.init_from."
        )
    held_out = read.data.val_dataset_param
    if held_out is not None and (held_out.dataset_type, bool(getattr(held_out, "mm_data", None))) != (DATA_ID, True):
        raise ConfigError(
            f"data.val_dataset_param does not name a data.json of ours. Write dataset_type: {DATA_ID}, and mm_data: "
            "the data.json of the validation set."
        )
    if parallel.fsdp_plan.ignored_modules and parallel.world_size > 1:
        raise ConfigError(
            f"parallel.fsdp_plan.ignored_modules = {parallel.fsdp_plan.ignored_modules} would let the ranks diverge, "
            "as the engine does not average the gradients of these modules. Drop it, or use --host standalone, which "
            "averages them."
        )


def _check_patterns(read: Any, mm: MultiModalArguments) -> None:
    """Raise ConfigError for a pattern that matches no module: the engine only checks all patterns together."""
    import torch
    from mindspeed.fsdp.utils.str_match import module_name_match
    from mindspeed_mm.fsdp.utils.lora_utils import match_target_modules

    if mm.fsdp2 is not None:
        check_recompute(mm.fsdp2, parameters_of(mm.model))
    with torch.device("meta"):
        predictor = build_predictor(mm.model)
    names = [name for name, _ in predictor.named_modules() if name]
    plan = read.parallel.fsdp_plan
    for setting, patterns in (
        ("parallel.fsdp_plan.apply_modules", plan.apply_modules),
        ("parallel.fsdp_plan.ignored_modules", plan.ignored_modules),
        ("features.recompute_plan.apply_modules", read.features.recompute_plan.apply_modules),
    ):
        for pattern in patterns or ():
            if not any(module_name_match(pattern, name) for name in names):
                raise ConfigError(f"{setting} has {pattern}, which matches no module. {nearest(pattern, names)}")
    for pattern in read.model.freeze:
        try:
            module_name_match(pattern, "")
        except ValueError:
            raise ConfigError(
                f"model.freeze has {pattern}, but in braces the engine takes only {{*}} and ranges such as {{0-3}}. "
                "Write several patterns."
            ) from None
    targets = read.training.lora.target_modules
    if lora_specs(mm.model) and not match_target_modules(predictor, targets):
        raise ConfigError(
            f"training.lora.target_modules = {targets} matches no module for the engine, which supports neither "
            "numbers in braces there nor sets like attention. Also name one of the layers in full: "
            f"{next(iter(lora_specs(mm.model)))}."
        )
