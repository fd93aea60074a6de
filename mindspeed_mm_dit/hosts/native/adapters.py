"""Adapters (LoRA) in the engine: it puts peft's beside layers of a model, and ours has every host's already.

So they begin with the draws of the seed, and a checkpoint of either host has them by the same names. What the engine
freezes before it asks peft is trained again here.
"""

from __future__ import annotations

from typing import Any

from mindspeed_mm_dit.errors import PlatformError
from mindspeed_mm_dit.hosts.native.model import TrainedPredictor


def keep_ours() -> None:
    """Let the engine find our adapters where it asks peft for some.

    Raises:
        PlatformError: there is no peft, which the engine imports.
    """
    try:
        import peft
    except ImportError:
        what = "training.lora.enable = true"
        raise PlatformError(what, "the engine asks peft for adapters, and it is not installed", "install it") from None
    theirs = peft.inject_adapter_in_model

    def inject(config: Any, model: Any, *rest: Any, **named: Any) -> Any:
        if not isinstance(model, TrainedPredictor):
            return theirs(config, model, *rest, **named)
        model.choose_trained()
        return model

    vars(peft)["inject_adapter_in_model"] = inject
