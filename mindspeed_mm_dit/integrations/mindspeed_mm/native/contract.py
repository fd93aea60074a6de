"""The lists of everything this package relies on in the engine and replaces there, and checks of both.

tests/contract compares the lists with our imports, and with an unpacked tree if there is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import ReliedOn, missing_from, package_folder

NAME = "mindspeed-mm-native"
"""Value of --host."""
KNOWN_MINDSPEED_MM = ("v26.1.0", "master (57069cd5)")
KNOWN_TORCH = ("2.7.1", "2.9.0")
"""Versions of PyTorch that the engine accepts, because it replaces private parts of FSDP2."""
TRAINER = "fsdp/train/trainer.py"

RELIED_ON: ReliedOn = {
    "mindspeed.fsdp.utils.str_match": {"module_name_match": ("pattern", "string")},
    "mindspeed_mm.config.config_manager": {"ConfigManager": None},
    "mindspeed_mm.config.exception": {"ConfigValidationError": None},
    "mindspeed_mm.fsdp.checkpoint.dcp_checkpointer": {"DistributedCheckpointer": None},
    "mindspeed_mm.fsdp.checkpoint.hf_checkpointer": {"HuggingFaceCheckpointer": None},
    "mindspeed_mm.fsdp.data.dataloader.data_collator": {"DATA_COLLATOR": None},
    "mindspeed_mm.fsdp.models.base_model": {"BaseModel": None},
    "mindspeed_mm.fsdp.params.argument": {"Arguments": None},
    "mindspeed_mm.fsdp.utils.lora_utils": {"match_target_modules": ("model", "patterns")},
    "mindspeed_mm.fsdp.utils.register": {"data_register": None, "model_register": None},
}

REPLACED: Mapping[str, tuple[str, ...]] = {
    "save": ("path", "state", "iteration", "save_ckpt_dtype"),
    "load": ("path", "state"),
}
"""Functions of the engine's checkpointers that ``register`` replaces, with the parameters that ours take by name;
nothing else of the engine is replaced."""


def check_replaced(checkpointer: type) -> None:
    """Raise PlatformError unless the engine's ``checkpointer`` has the functions that we replace, as we know them."""
    for name, parameters in REPLACED.items():
        function = getattr(checkpointer, name, None)
        actual = tuple(inspect.signature(function).parameters) if function else ()
        if missing := [parameter for parameter in parameters if parameter not in actual]:
            raise PlatformError(
                f"{checkpointer.__name__}.{name} of MindSpeed-MM has the parameters {actual}, and lacks "
                f"{', '.join(missing)}, which our replacement needs. Use MindSpeed-MM {KNOWN_MINDSPEED_MM[0]} "
                "(docs/mindspeed_mm.md)."
            )


def check_engine(what: str = f"--host = {NAME}") -> None:
    """Raise PlatformError if the engine, which ``what`` requires, is missing or cannot run; does not import it."""
    import torch

    mindspeed = package_folder("mindspeed")
    missing = [name for name in ("mindspeed_mm", "mindspeed") if package_folder(name) is None]
    if missing or mindspeed is None:
        instead = ", or leave --host out" if what.startswith("--host") else ""
        raise PlatformError(
            f"{what} needs {' and '.join(missing)}, which cannot be found. Install MindSpeed-MM (it is not on PyPI)"
            f"{instead}."
        )
    if not trainer_script().is_file():
        raise PlatformError(
            f"{what} needs {TRAINER}, which this MindSpeed-MM does not have. Use MindSpeed-MM {KNOWN_MINDSPEED_MM[0]}."
        )
    if not (mindspeed / "fsdp").is_dir():
        raise PlatformError(
            f"{what} needs mindspeed.fsdp, which the MindSpeed in {mindspeed} does not have. Use the branch that goes "
            "with your MindSpeed-MM, e.g. 26.1.0_core_r0.12.1 for v26.1.0."
        )
    if lacking := missing_from(RELIED_ON):
        raise PlatformError(
            f"{what} needs {', '.join(lacking)}, which the installed packages do not have. Use MindSpeed-MM "
            f"{' or '.join(KNOWN_MINDSPEED_MM)} with its MindSpeed (docs/mindspeed_mm.md)."
        )
    if not torch.__version__.startswith(KNOWN_TORCH):  # (2.7.1.post4 counts, as in the engine)
        raise PlatformError(
            f"{what} needs PyTorch {' or '.join(KNOWN_TORCH)}, and this is {torch.__version__.partition('+')[0]}. "
            "Install one of them, or use --host standalone."
        )


def trainer_script() -> Path:
    """Return the engine's entry script."""
    return (package_folder("mindspeed_mm") or Path("mindspeed_mm")) / TRAINER
