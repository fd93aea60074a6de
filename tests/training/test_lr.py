import types

import pytest

from mindspeed_mm_dit.training.loop import LearningRate


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_every_step_has_megatrons_learning_rate(style, warmup_steps):
    megatron = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    ours = LearningRate(peak=1e-3, minimum=1e-5, init=1e-6, warmup_steps=warmup_steps, decay_steps=40, style=style)
    reference = types.SimpleNamespace(
        max_lr=1e-3, min_lr=1e-5, init_lr=1e-6, lr_warmup_steps=warmup_steps, lr_decay_steps=40, lr_decay_style=style
    )
    for step in range(60):
        reference.num_steps = step
        expected = megatron.OptimizerParamScheduler.get_lr(reference, {})
        assert ours.at(step) == pytest.approx(expected, rel=1e-12)
