"""Initial weights as a pure function of (seed, parameter name), drawn with NumPy.

So every rank, every framework and every sharding starts from the same numbers. The rules are those of the
published DiT: adaLN-Zero makes every block the identity at the start.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np

from mindspeed_mm_dit.data.draws import philox
from mindspeed_mm_dit.errors import ConfigError

_STREAM = 0x1717  # keeps these draws apart from those of the data


def initial_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return the initial value of each trained parameter of a DiT, float32, by state-dict name.

    Args:
        shapes: name -> shape of the trained parameters (the frozen positions are not among them).
        seed: any whole number of at least 0.

    Raises:
        ConfigError: a vector that is neither a bias nor a norm's gain, such as another predictor may have.
    """
    return {name: _initial_weight(name, shape, seed) for name, shape in shapes.items()}


def _initial_weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if len(shape) < 2:
        return _initial_gain(name, shape)
    if "adaLN_modulation" in name or name.startswith("final_layer.linear"):
        return np.zeros(shape, np.float32)
    draw = philox((seed, _STREAM << 32 | zlib.crc32(name.encode())))
    if name.startswith(("t_embedder", "y_embedder")):
        return draw.standard_normal(shape, np.float32) * np.float32(0.02)
    fan_out, fan_in = shape[0], math.prod(shape[1:])
    bound = math.sqrt(6 / (fan_in + fan_out))  # Glorot & Bengio 2010, eq. 16
    return (draw.random(shape, np.float32) * 2 - 1) * np.float32(bound)


def _initial_gain(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Ones for the gain of a norm, which is known by the name of its module: "norm1.weight", "q_norm.weight"."""
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" and "norm" in module.rpartition(".")[2].lower():
        return np.ones(shape, np.float32)
    raise ConfigError(
        f"predictor: parameter {name} of shape {shape}",
        "starts from an unknown value: it is neither a bias nor the gain of a norm",
        "give the module of a norm a name with 'norm' in it; what starts otherwise needs a rule in models/init.py",
    )
