"""What makes them known: the function that an entry point names, and what pip writes of a package that has one."""

from pathlib import Path

from tests.conftest import ROOT
from tests.external.autoencoder import FOLDED
from tests.external.objective import DENOISE
from tests.external.optimizer import LION
from tests.external.predictor import ResidualConfig
from tests.external.text_encoder import LETTERS


def register() -> None:
    """Make predictor "residual", objective "denoise", optimizer "lion", and what reads and encodes known."""
    from mindspeed_mm_dit.models.registry import (
        register_autoencoder,
        register_objective,
        register_predictor,
        register_text_encoder,
    )
    from mindspeed_mm_dit.optimizers.registry import register_optimizer

    register_predictor(ResidualConfig)
    register_objective("denoise", DENOISE)
    register_autoencoder("folded", FOLDED)
    register_text_encoder("letters", LETTERS)
    register_optimizer("lion", LION)


def register_rotary() -> None:
    """Make predictor "turned" known, its condition, and where its samples are; and all of ``register``."""
    from mindspeed_mm_dit.data.conditions import register_condition
    from mindspeed_mm_dit.data.sources import register_source
    from mindspeed_mm_dit.models.registry import register_predictor
    from tests.external.condition import ANGLE, Angle, TurnedConfig
    from tests.external.source import TURNED

    register()
    register_source("turned", TURNED)
    register_condition(Angle, ANGLE)
    register_predictor(TurnedConfig)


def register_parts_of_runs() -> None:
    """Make metrics logger "csv", callback "patience", host "one-step" and command "count" known."""
    from mindspeed_mm_dit.registry import register

    register("metrics_logger", "csv", "tests.external.metrics_logger:CSV")
    register("callback", "patience", "tests.external.callback:PATIENCE")
    register("host", "one-step", "tests.external.host:ONE_STEP")
    register("command", "count", "tests.external.command:COUNT")


def install(folder: Path, function: str = "tests.external.plugin:register") -> str:
    """Write into ``folder`` what pip writes of a package with this plugin; return the PYTHONPATH that has it."""
    facts = folder / "outside-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[mindspeed_mm_dit.plugins]\noutside = {function}\n")
    return f"{ROOT}:{folder}"
