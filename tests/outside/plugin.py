"""What makes them known: the function that an entry point names, and what pip writes of a package that has one."""

from pathlib import Path

from tests.conftest import ROOT
from tests.outside.autoencoder import FOLDED
from tests.outside.objective import DENOISE
from tests.outside.optimizer import LION
from tests.outside.predictor import ResidualConfig
from tests.outside.text_encoder import LETTERS


def join() -> None:
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


def join_turned() -> None:
    """Make predictor "turned" known, what steers it, and where its samples are; and all of ``join``."""
    from mindspeed_mm_dit.data.conditions.registry import register_condition
    from mindspeed_mm_dit.data.sources import register_source
    from mindspeed_mm_dit.models.registry import register_predictor
    from tests.outside.condition import ANGLE, Angle, TurnedConfig
    from tests.outside.source import TURNED

    join()
    register_source("turned", TURNED)
    register_condition(Angle, ANGLE)
    register_predictor(TurnedConfig)


def join_runs() -> None:
    """Make tracker "csv", watcher "patience", host "one-step" and command "count" known."""
    from mindspeed_mm_dit.registry import join

    join("tracker", "csv", "tests.outside.tracker:CSV")
    join("watcher", "patience", "tests.outside.watcher:PATIENCE")
    join("host", "one-step", "tests.outside.host:ONE_STEP")
    join("command", "count", "tests.outside.command:COUNT")


def install(folder: Path, function: str = "tests.outside.plugin:join") -> str:
    """Write into ``folder`` what pip writes of a package with this plugin; return the PYTHONPATH that has it."""
    facts = folder / "outside-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[mindspeed_mm_dit.plugins]\noutside = {function}\n")
    return f"{ROOT}:{folder}"
