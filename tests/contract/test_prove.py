"""mm-dit prove in both routes of the real MindSpeed-MM: a right step passes, and a fault there is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindspeed_mm_dit.verify import proof
from mindspeed_mm_dit.verify.layouts import chosen
from mindspeed_mm_dit.verify.proof import open_config, prove
from tests.contract import hosted, native_hosted
from tests.training.launch import Configs
from tests.verify.campaign import config_folder

ROUTES = [
    pytest.param("MindSpeed-MM, old route", hosted, marks=hosted.needs_trees),
    pytest.param("MindSpeed-MM, native engine", native_hosted, marks=native_hosted.needs_engine),
]
pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("name", "route"), ROUTES)
def test_a_step_in_mindspeed_mm_is_the_truth_and_an_average_that_stands_still_is_named(
    name, route, tmp_path: Path, digits_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in route.environment().items():
        monkeypatch.setenv(variable, value)
    configs = Configs.create(tmp_path / "config", digits_folder, hidden_size=32, num_layers=2, num_heads=2)
    pythons = {"pytorch": os.environ["MINDSPEED_MM_PYTHON"]}
    given, layouts, verdicts = config_folder(configs), chosen([name]), []
    for folder, script in (("right", proof.HOSTED), ("planted", Path(__file__).with_name("plants.py"))):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(proof, "HOSTED", script)
        config = open_config(given, tmp_path / folder, None, True, steps=2)
        verdicts += prove(config, layouts, pythons, lambda text: None)
    right, planted = verdicts
    assert right.word == "PASS", (right.reason, right.wrong)
    assert {finding.kind for finding in right.findings} == {"loss", "gradient norm", "gradient", "step", "average"}
    assert planted.named.startswith("average/") and planted.place.startswith("the average"), planted
