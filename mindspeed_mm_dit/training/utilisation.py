"""How much of the hardware a run uses: images per second as a share of the peak."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.planning.arithmetic import train_flop
from mindspeed_mm_dit.planning.peaks import peak_tflops, utilisation


def meter(args: RunConfig) -> Callable[[float], float | None]:
    """Return MFU as a function of the images per second of all ranks; None where the peak is unknown."""
    precision = args.mm.precision
    assert precision is not None
    peak = args.peak_tflops or peak_tflops(runtime.device_name(), precision.compute)
    predictor, devices = args.mm.model.predictor, runtime.world_size()
    if peak is None:
        return lambda images_per_second: None
    return lambda images_per_second: utilisation(images_per_second, train_flop(predictor), peak, devices)
