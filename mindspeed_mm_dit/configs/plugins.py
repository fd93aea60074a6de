"""Loads predictors, objectives, autoencoders and text encoders from other installed packages.

A package declares a function without arguments under the entry point group ``mindspeed_mm_dit.plugins``::

    [project.entry-points."mindspeed_mm_dit.plugins"]
    my_predictor = "my_package:join"

The function calls ``register``, ``register_objective``, ``register_autoencoder`` or ``register_text_encoder`` of
``mindspeed_mm_dit.models.registry``. Training, mm-dit and the processes that they start then all know its ``model_id``.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from mindspeed_mm_dit.errors import PlatformError, UserError
from mindspeed_mm_dit.registry import load_wings

GROUP = "mindspeed_mm_dit.plugins"


@lru_cache(maxsize=1)
def load_plugins() -> tuple[str, ...]:
    """Let every installed plugin register itself, once per process, and return the plugins' names.

    Raises:
        ConfigError: two plugins register the same name.
        PlatformError: a plugin cannot be imported, or fails.
    """
    load_wings()
    found = sorted(entry_points(group=GROUP))
    for point in found:
        try:
            point.load()()
        except UserError:
            raise
        except Exception as error:  # (a plugin may raise anything)
            raise PlatformError(
                f"plugin {point.name} ({point.value})",
                f"failed to load: {type(error).__name__}: {error}",
                "fix it, or uninstall its package",
            ) from error
    return tuple(point.name for point in found)
