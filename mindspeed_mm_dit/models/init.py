"""Initial weights as a pure function of (seed, parameter name), drawn with NumPy.

So every rank, framework and sharding starts from the same numbers. The predictor's config declares how each parameter
is initialized (``configs/predictor.py``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np

from mindspeed_mm_dit.configs.predictor import Initial, Normal, Parameter, Parameters, Shape
from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.positions import sincos_positions_2d

_STREAM = 0x1717  # keeps these draws apart from those of the data


def initial_weights(parameters: Parameters, seed: int) -> dict[str, np.ndarray]:
    """Return the initial value of each parameter, trained or not, float32, by its name in a checkpoint.

    seed: a whole number, at least 0.
    """
    return {name: initial_value(name, parameter, seed) for name, parameter in parameters}


def initial_value(name: str, parameter: Parameter, seed: int) -> np.ndarray:
    """Return the initial value of one parameter, float32."""
    shape, rule = parameter.shape, parameter.initial
    if rule is Initial.ZEROS:
        return np.zeros(shape, np.float32)
    if rule is Initial.ONES:
        return np.ones(shape, np.float32)
    if rule is Initial.SINCOS_2D:
        return sincos_positions_2d(shape[2], math.isqrt(shape[1]))[None]
    draw = philox((seed, _STREAM << 32 | zlib.crc32(name.encode())))
    if isinstance(rule, Normal):
        return draw.standard_normal(shape, np.float32) * np.float32(rule.std)
    if rule is Initial.XAVIER_UNIFORM:
        return (draw.random(shape, np.float32) * 2 - 1) * np.float32(xavier_bound(shape))
    return np.asarray(rule(draw, shape), np.float32).reshape(shape)  # type: ignore[operator]


def xavier_bound(shape: Shape) -> float:
    """Return the bound of the uniform distribution (Glorot & Bengio 2010, eq. 16)."""
    return math.sqrt(6 / (math.prod(shape[1:]) + shape[0]))


def check_declared(declared: Mapping[str, Shape], built: Mapping[str, Shape], model_id: str) -> None:
    """Raise ConfigError unless a network has exactly the parameters that its config declares."""
    for name in sorted(declared.keys() | built.keys()):
        if declared.get(name) != built.get(name):
            raise ConfigError(
                f"predictor {model_id!r}: parameter {name}",
                f"is {built.get(name, 'absent')} in the network and {declared.get(name, 'absent')} in parameters() of "
                "its config",
                "make the two agree: plans, checkpoints and initial weights go by parameters()",
            )
