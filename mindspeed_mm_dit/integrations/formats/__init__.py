"""Checkpoints, autoencoders and adapters in the formats of other programs, and ``mm-dit convert``.

The core reads and writes them through the registry kinds ``checkpoint_format`` and ``adapter_format``.
"""

from __future__ import annotations


def register() -> None:
    """Register the formats, in the order in which they are tried, and the command."""
    from mindspeed_mm_dit.cli.commands import Command
    from mindspeed_mm_dit.registry import register

    for name, location in {
        "pipeline": "pipelines:PIPELINE",
        "diffusers": "diffusers_folder:DIFFUSERS",
        "pt": "single_files:PT",
        "safetensors": "single_files:SAFETENSORS",
        "original": "single_files:ORIGINAL",
        "ckpt": "single_files:CKPT",
        "gguf": "gguf_files:GGUF",
    }.items():
        register("checkpoint_format", name, f"{__name__}.{location}")
    for name in ("diffusers", "peft", "kohya", "native"):
        register("adapter_format", name, f"{__name__}.lora_files:{name.upper()}_LORA")
    register("command", "convert", Command("write a checkpoint in another format", f"{__name__}.convert"))
