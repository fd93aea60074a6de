"""What this room relies on in the host, as one list, and whether the host has it.

The list is looked at whenever the host is attached; tests/contract compares it with our imports.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.hosts.megatron import pairs

RELIED_ON: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
    "megatron.core.enums": {"ModelType": None},
    "megatron.training": {"get_args": None, "print_rank_0": None},
    "megatron.training.arguments": {"core_transformer_config_from_args": ("args", "config_class")},
    "megatron.training.utils": {"average_losses_across_data_parallel_group": ("losses",)},
    "mindspeed.megatron_adaptor": {},
    "mindspeed_mm.configs.config": {"mm_extra_args_provider": ("parser",)},
    "mindspeed_mm.mindspore.mindspore_adaptor": {},
    "mindspeed_mm.models.ae.base": {"AE_MODEL_MAPPINGS": None},
    "mindspeed_mm.models.common.module": {"MultiModalModule": ("config",)},
    "mindspeed_mm.models.diffusion.diffusion_model": {"DIFFUSION_MODEL_MAPPINGS": None},
    "mindspeed_mm.models.predictor.predict_model": {"PREDICTOR_MODEL_MAPPINGS": None},
    "mindspeed_mm.models.transformers.base_model": {"FSDP2Mixin": ()},
    "mindspeed_mm.patchs.torch_dcp_patch": {},
    "mindspeed_mm.training": {
        "pretrain": (
            "train_valid_test_dataset_provider",
            "model_provider",
            "model_type",
            "forward_step_func",
            "process_non_loss_data_func",
            "extra_args_provider",
            "args_defaults",
        )
    },
    "checkpoint.common.converter": {"Commandable": None},
    "checkpoint.convert_cli": {"main": ()},
}
"""Module -> name -> parameters of the function or of the class's constructor (None: not called by us)."""


IN_THEIR_SCRIPTS = (
    "mindspeed_mm.models.ae.base",
    "mindspeed_mm.models.diffusion.diffusion_model",
    "mindspeed_mm.models.predictor.predict_model",
)
"""What only our models in the host's own scripts need (``run``), ..."""
CONVERTING = ("checkpoint.common.converter", "checkpoint.convert_cli")
"""... only the converter, ..."""
ON_MINDSPORE = ("mindspeed_mm.mindspore.mindspore_adaptor",)
"""... and only --ai-framework mindspore."""


def check_host(mindspore: bool, in_their_scripts: bool = False) -> None:
    """Check, before the host is imported, that it is the one this room relies on.

    mindspore: it is to compute on MindSpore; in_their_scripts: a script of its own is run, not pretrain_dit.py.

    Raises:
        ConfigError: the shell asks it to go without Megatron.
        PlatformError: something is missing in it; what it is.
    """
    if os.environ.get("NON_MEGATRON") == "true":  # (MindSpeed-MM passes over any other value)
        raise ConfigError(
            "NON_MEGATRON = true",
            "with it MindSpeed-MM starts its native engine, without Megatron; this run trains in Megatron",
            "unset NON_MEGATRON, or pass --host mindspeed-mm-native",
        )
    spared = {*CONVERTING, *(() if mindspore else ON_MINDSPORE), *(() if in_their_scripts else IN_THEIR_SCRIPTS)}
    missing = lacks(module for module in RELIED_ON if module not in spared)
    if missing:
        raise PlatformError(
            "--host = mindspeed-mm",
            f"what is installed lacks {', '.join(missing)}, which this project relies on",
            f"install a tested pair ({pairs.in_words()}) with Megatron-LM {pairs.MEGATRON}; see docs/mindspeed_mm.md",
        )


def lacks(modules: Iterable[str]) -> list[str]:
    """Return what the host here lacks of RELIED_ON, of the parts ``modules``, in words; nothing is imported."""
    found = []
    for module in modules:
        file = pairs.source_of(module)
        if file is None:
            found.append(module)
            continue
        there = {name: node for node in _top_level(ast.parse(file.read_text("utf-8"))) for name in _names(node)}
        for name, parameters in RELIED_ON[module].items():
            if name not in there and "*" not in there:
                found.append(f"{module}.{name}")
            elif parameters is not None and _parameters(there.get(name)) not in (None, parameters):
                found.append(f"{module}.{name}({', '.join(parameters)})")
    return found


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module, and those under an ``if`` or ``try`` of it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _top_level(child)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def _parameters(node: ast.AST | None) -> tuple[str, ...] | None:
    """Return the parameters of a function or of a class's constructor; None where its source does not tell."""
    if isinstance(node, ast.ClassDef):
        node = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    return tuple(argument.arg for argument in node.args.args if argument.arg != "self")


def where(package: str) -> Path | None:
    """Return the folder of an installed package or unpacked tree."""
    return next(iter(pairs.folders(package)), None)
