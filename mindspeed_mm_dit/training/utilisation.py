"""How much of the hardware a run uses: its MFU, as a fraction of the peak."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.planning.arithmetic import peak_tflops, utilisation
from mindspeed_mm_dit.training.data_set import open_data_set


def meter(args: RunConfig) -> Callable[[float], float | None]:
    """Return MFU as a function of the images per second of all ranks; it gives None if the peak is unknown."""
    precision = args.mm.precision
    assert precision is not None
    peak = args.peak_tflops or peak_tflops(runtime.device_name(), precision.compute)
    if peak is None:
        return lambda images_per_second: None
    flop, devices = open_data_set(args.mm, args.seed).flop_of_a_sample(), runtime.world_size()
    return lambda images_per_second: utilisation(images_per_second, flop, peak, devices)
