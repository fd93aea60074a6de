"""The Python API, ``import mindspeed_mm_dit as dit``. A framework is imported only when a function is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.pipeline import Pipeline

Framework = Literal["pytorch", "mindspore"]


def load(
    checkpoint: str | Path,
    *,
    model: str | Path | None = None,
    weights: Literal["ema", "model"] = "ema",
    lora: Sequence[str] = (),
    low_noise_checkpoint: str | Path | None = None,
    boundary: float | None = None,
    low_noise_lora: Sequence[str] = (),
    framework: Framework = "pytorch",
    bf16: bool = False,
) -> Pipeline:
    """Load a trained model and return it, ready to sample from.

    checkpoint: the folder of a run or of its checkpoints (the newest is used), a .pt, .safetensors or MindSpore .ckpt
    file, or a diffusers folder. model: its model.json, if the checkpoint does not contain it. weights: "ema" for the
    EMA, or "model" for the weights being trained. lora: adapters to add to them, each "FILE" or "FILE:STRENGTH".
    low_noise_checkpoint: the second expert of Wan 2.2, if ``checkpoint`` is the first, with its adapters; a diffusers
    folder with transformer_2 is both. boundary: the noise level that parts them, if the checkpoints do not say it.

    >>> import mindspeed_mm_dit as dit
    >>> pipe = dit.load("outputs/digits/checkpoints")                                          # doctest: +SKIP
    >>> pipe.sample(classes=["3", 7], num=4, steps=25, guidance=2.0, seed=0).save("some.png")  # doctest: +SKIP
    """
    from mindspeed_mm_dit.configs.limits import path_of, switch
    from mindspeed_mm_dit.errors import ConfigError
    from mindspeed_mm_dit.framework import activate

    if weights not in ("ema", "model"):
        raise ConfigError(f"weights = {weights!r}", "is neither 'ema' nor 'model'", "drop it for the moving average")
    activate(framework)
    from mindspeed_mm_dit.sampling.pipeline import Pipeline

    def paths(name: str, given: Sequence[str]) -> list[str]:
        return [path_of(name, own) for own in ([given] if isinstance(given, (str, Path)) else given)]

    return Pipeline.of_checkpoint(
        path_of("checkpoint", checkpoint),
        None if model is None else path_of("model", model),
        weights == "ema",
        switch("bf16", bf16),
        (paths("lora", lora), paths("low_noise_lora", low_noise_lora)),
        None if low_noise_checkpoint is None else path_of("low_noise_checkpoint", low_noise_checkpoint),
        boundary,
    )


def create(config: str | Path, *, seed: int = 0, framework: Framework = "pytorch") -> Pipeline:
    """Return an untrained model with initial weights, which depend only on ``seed``.

    config: a model.json, a folder with one, or the name of an embedded config.

    >>> import mindspeed_mm_dit as dit
    >>> pipe = dit.create("digits")
    >>> sum(weight.numel() for weight in pipe.predictor.parameters())
    1275920
    >>> image, *_ = pipe.sample(classes=[3], steps=2, guidance=1.0)
    >>> image.size
    (8, 8)
    """
    from mindspeed_mm_dit.configs.embedded import config_folder
    from mindspeed_mm_dit.configs.limits import path_of
    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.framework import activate

    activate(framework)
    from mindspeed_mm_dit.sampling.pipeline import Pipeline

    place = path_of("config", config)
    there = next((file for file in (Path(place), Path(place) / "model.json") if file.is_file()), None)
    return Pipeline.untrained(load_model_config(there or config_folder(place) / "model.json"), seed)
