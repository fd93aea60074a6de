"""Write the two experts of Wan 2.2 as one folder of diffusers, which a pipeline loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mindspeed_mm_dit.checkpoint.convert import convert
from mindspeed_mm_dit.checkpoint.formats.diffusers import INDEX
from mindspeed_mm_dit.checkpoint.targets import Summary, check_target, written
from mindspeed_mm_dit.checkpoint.wan_folder import FIRST, FROM_IMAGE, FROM_TEXT, SECOND
from mindspeed_mm_dit.configs.strict import read_json

_PIPELINE_NOTE = (
    "for a whole pipeline add vae, text_encoder, tokenizer and scheduler of the published model to the folder"
)


def convert_experts(
    high: str | Path,
    low: str | Path,
    target: str | Path,
    boundary: float,
    weights: str | None = None,
    overwrite: bool = False,
    echo: Callable[[str], object] = lambda line: None,
) -> Summary:
    """Write ``target``: transformer/ and transformer_2/, each as :func:`convert` does, and model_index.json.

    boundary: noise level at and above which the high-noise expert is used. The caller has checked that the two belong
    together. Raises a UserError as ``convert`` does.
    """
    target, done = Path(target), list[Summary]()
    for source in (high, low):
        check_target(Path(source), target, overwrite)

    def make(aside: Path) -> None:
        for source, part in ((high, FIRST), (low, SECOND)):
            done.append(convert(source, aside / part, "diffusers", weights, echo=echo))
        network = read_json(aside / FIRST / "config.json", "SOURCE")
        from_image = network["in_channels"] > network["out_channels"]
        index = {"_class_name": FROM_IMAGE if from_image else FROM_TEXT, "boundary_ratio": boundary}
        index |= {part: ["diffusers", "WanTransformer3DModel"] for part in (FIRST, SECOND)}
        (aside / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    written(target, make, is_folder=True)
    first, second = done
    notes = (*dict.fromkeys((*first.notes, *second.notes)), _PIPELINE_NOTE)
    return first._replace(
        target=target, num_tensors=first.num_tensors + second.num_tensors,
        num_bytes=first.num_bytes + second.num_bytes, notes=notes,
    )  # fmt: skip
