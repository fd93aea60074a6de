"""Register our models in MindSpeed-MM's own tables, for its own entry scripts.

    from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.register import register
    register()

Afterwards a model.json of the host may name our ``model_id``s. ``run`` registers them and starts a script.
"""

from __future__ import annotations

from typing import Any

from mindspeed_mm.models.ae.base import AE_MODEL_MAPPINGS
from mindspeed_mm.models.diffusion.diffusion_model import DIFFUSION_MODEL_MAPPINGS
from mindspeed_mm.models.predictor.predict_model import PREDICTOR_MODEL_MAPPINGS

from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.sora import SoRAAutoencoder, SoRADiffusion, predictor_class
from mindspeed_mm_dit.models.registry import AUTOENCODERS
from mindspeed_mm_dit.objectives.registry import OBJECTIVES

_OUR_OBJECTIVES = [name for name in OBJECTIVES if name != "wan_flow_match_scheduler"]
"""Objectives that the host does not have itself."""
_OUR_AUTOENCODERS = [name for name, kind in AUTOENCODERS.items() if 2 in kind.config.pixel_axes]
"""Autoencoders of images."""
_OUR_PREDICTORS = {name: predictor_class(kind) for name, kind in PREDICTOR_CONFIGS.items()}

OURS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("PREDICTOR_MODEL_MAPPINGS", PREDICTOR_MODEL_MAPPINGS, _OUR_PREDICTORS),
    ("DIFFUSION_MODEL_MAPPINGS", DIFFUSION_MODEL_MAPPINGS, dict.fromkeys(_OUR_OBJECTIVES, SoRADiffusion)),
    ("AE_MODEL_MAPPINGS", AE_MODEL_MAPPINGS, dict.fromkeys(_OUR_AUTOENCODERS, SoRAAutoencoder)),
)
"""(name of the host's table, the table, our entries)."""


def register() -> None:
    """Add our entries to the host's tables; may be called repeatedly.

    Raises:
        ConfigError: another plugin or the host has taken one of the names; then nothing has been added.
    """
    for name, table, entries in OURS:
        for model_id, ours in entries.items():
            entry = table.get(model_id, ours)
            if entry is not ours:
                raise ConfigError(
                    f"mindspeed_mm {name}[{model_id!r}] is taken by {entry.__module__}.{entry.__qualname__}. Unload "
                    "the other plugin; a foreign entry is never replaced."
                )
    for _, table, entries in OURS:
        table.update(entries)
