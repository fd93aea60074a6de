"""A teacher as another package brings it: the brightness of each patch."""

from dataclasses import dataclass

from mindspeed_mm_dit.configs.teacher import TeacherConfig
from mindspeed_mm_dit.models.registry import TeacherSpec


@dataclass(frozen=True)
class Brightness(TeacherConfig):
    model_id: str = "brightness"

    def width(self):
        return 1

    def identity(self):
        return "brightness"


def build(config, side):
    import torch

    return lambda images: torch.nn.functional.adaptive_avg_pool2d(images, side).flatten(2).transpose(1, 2)


BRIGHTNESS = TeacherSpec(Brightness, build)
