"""Convert adapters (LoRA) from one program's format to another's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.lora import files
from mindspeed_mm_dit.checkpoint.lora.files import LORA_FORMATS
from mindspeed_mm_dit.checkpoint.lora.names import layers_of
from mindspeed_mm_dit.checkpoint.lora.source import Shapes, adapter_facts, read
from mindspeed_mm_dit.checkpoint.store import read_facts
from mindspeed_mm_dit.checkpoint.targets import Summary, check_target, written
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.run import check_output_folder
from mindspeed_mm_dit.errors import ConfigError, nearest
from mindspeed_mm_dit.models.meta import parameters_of


def convert_adapter(
    source: Path,
    target: Path,
    to: str | None,
    use_ema: bool,
    description: dict[str, Any] | None,
    overwrite: bool,
    echo: Callable[[str], object],
) -> Summary:
    """Write the adapters in ``source`` as ``target``, in a format that other programs read.

    description: content of the base's model.json; may be None, and is not needed for a run's checkpoint, which has it.

    Raises a UserError if there is no such format, or the adapters do not fit that base.
    """
    form = _form(target, to)
    check_target(source, target, overwrite, files.fits)
    check_output_folder("folder of TARGET", target.parent)
    echo(f"reading {source} (adapters)")
    shapes = _shapes(source, description)
    adapter = read(source, layers_of(shapes) if shapes else None, use_ema)
    if shapes:
        adapter.check_fits(shapes)
    arrays = adapter.arrays().values()
    num_bytes = sum(array.nbytes for array in arrays)
    echo(f"writing {target} ({form}): adapters of {len(adapter.layers)} layers, {num_bytes / 1e6:.1f} MB")
    notes: list[str] = []
    known = LORA_FORMATS[form]
    written(target, lambda aside: notes.extend(known.write(aside, adapter, shapes)), known.is_folder)
    tree = ("adapters, average" if use_ema else "adapters") if adapter_facts(source) else "adapters"
    return Summary(source, "adapters", target, form, (tree,), len(arrays), num_bytes, (*adapter.notes, *notes))


def _form(target: Path, to: str | None) -> str:
    if to not in LORA_FORMATS:
        raise ConfigError(
            "--to" if to is None else f"--to = {to}",
            f"{'is needed' if to is None else 'is no form of adapters'}: SOURCE holds adapters (LoRA)",
            f"{nearest(to or '', LORA_FORMATS)}Forms are: {', '.join(LORA_FORMATS)}; or name the weights of their "
            "base as SOURCE, and the adapters by --merge-lora",
        )
    if LORA_FORMATS[to].is_folder == (target.suffix == ".safetensors"):
        cure = "name a folder" if LORA_FORMATS[to].is_folder else "end it in .safetensors"
        raise ConfigError(f"TARGET = {target}", f"does not look like --to {to}", cure)
    return to


def _shapes(source: Path, description: dict[str, Any] | None) -> Shapes:
    """Return the shapes of the base's weights; {} if unknown."""
    content = description or (read_facts(source).get("model") if adapter_facts(source) else None)
    return parameters_of(model_config_from_mapping(content, "--model")).shapes() if content else {}
