"""Initial weights as a pure function of (seed, parameter name), generated with NumPy.

So every rank, framework and sharding starts from the same numbers. A network declares how each of its parameters is
initialised (``configs/predictor.py``).
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from mindspeed_mm_dit.configs.predictor import ONES, XAVIER_UNIFORM, ZEROS, Normal, ParameterSpec, ParameterSpecs
from mindspeed_mm_dit.data.order import philox

_STREAM = 0x1717  # keeps these draws apart from those of the data


def initial_weights(parameters: ParameterSpecs, seed: int) -> dict[str, np.ndarray]:
    """Return the initial value of each parameter, trained or not, float32, by its name in a checkpoint.

    seed: a whole number, at least 0.
    """
    return {name: initial_value(name, parameter, seed) for name, parameter in parameters.items()}


def initial_value(name: str, parameter: ParameterSpec, seed: int) -> np.ndarray:
    """Return the initial value of one parameter, float32."""
    shape, rule = parameter.shape, parameter.initial
    if rule is ZEROS:
        return np.zeros(shape, np.float32)
    if rule is ONES:
        return np.ones(shape, np.float32)
    draw = philox((seed, _STREAM << 32 | zlib.crc32(name.encode())))
    if isinstance(rule, Normal):
        return draw.standard_normal(shape, np.float32) * np.float32(rule.std)
    if rule is XAVIER_UNIFORM:
        bound = math.sqrt(6 / (math.prod(shape[1:]) + shape[0]))  # (Glorot & Bengio 2010, eq. 16)
        return (draw.random(shape, np.float32) * 2 - 1) * np.float32(bound)
    return np.asarray(rule(draw, shape), np.float32).reshape(shape)  # type: ignore[operator]
