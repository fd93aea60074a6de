"""Predictors, objectives, autoencoders and text encoders of other packages, known wherever a model.json is read.

A package offers a function without arguments under the entry point group ``mindspeed_mm_dit.plugins``::

    [project.entry-points."mindspeed_mm_dit.plugins"]
    my_predictor = "my_package:join"

and calls ``register``, ``register_objective``, ``register_autoencoder`` or ``register_text_encoder`` of
``mindspeed_mm_dit.models.registry`` in it. So training, mm-dit and
the processes that they start all know its ``model_id``.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from mindspeed_mm_dit.errors import PlatformError, UserError

GROUP = "mindspeed_mm_dit.plugins"


@lru_cache(maxsize=1)
def load_plugins() -> tuple[str, ...]:
    """Let every installed plugin register what it offers, once a process, and return their names.

    Raises:
        ConfigError: two plugins want the same name.
        PlatformError: one of them cannot be imported, or fails.
    """
    found = sorted(entry_points(group=GROUP))
    for point in found:
        try:
            point.load()()
        except UserError:
            raise
        except Exception as error:  # (whatever another's code raises)
            raise PlatformError(
                f"plugin {point.name} ({point.value})",
                f"fails: {type(error).__name__}: {error}",
                "repair it, or uninstall its package",
            ) from error
    return tuple(point.name for point in found)
