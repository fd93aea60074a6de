"""What MindSpore alone has to do for the names of the contract: versions and compilation."""

import numpy as np
import pytest

from mindspeed_mm_dit.errors import PlatformError


def draw(*shape):
    return np.random.default_rng(0).uniform(-0.2, 0.2, shape).astype(np.float32)


def test_numpy_2_beside_mindspore_is_refused_with_the_cure(mindspore):
    from mindspeed_mm_dit.framework.mindspore import check_numpy

    check_numpy("1.26.4")
    with pytest.raises(PlatformError, match="pip install 'numpy<2'"):
        check_numpy("2.1.0")


def test_the_compiled_network_equals_the_interpreted_one(mindspore, framework):
    from mindspeed_mm_dit.configs.dit import DiTConfig
    from mindspeed_mm_dit.models.dit import DiT

    model = DiT(DiTConfig(8, 10, 4, 2, 32, 2, 4))
    weights = {name: draw(*p.shape) for name, p in model.named_parameters()}
    framework.runtime.load_arrays(model, weights)
    inputs = [framework.ops.tensor(x) for x in (draw(2, 4, 8, 8), np.array([0, 999]), np.array([3, 10]))]
    compiled, interpreted = mindspore.jit(model)(*inputs), model(*inputs)
    np.testing.assert_allclose(compiled.asnumpy(), interpreted.asnumpy(), rtol=1e-4, atol=1e-5)


def test_a_step_of_adamw_compiles_nothing(mindspore, framework, monkeypatch):
    """A graph would be compiled for one step of one network, which takes seconds."""
    from mindspore.graph import api

    compiled = []
    monkeypatch.setattr(api._JitExecutor, "compile", lambda executor, *given, **named: compiled.append(executor.fn))
    layer = framework.nn.Linear(3, 2)
    before = framework.ops.numpy(layer.weight).copy()
    framework.optim.adamw_step(layer, lambda: layer(framework.ops.tensor(draw(4, 3))).mean(axis=1), lr=1e-3)
    assert compiled == [] and (framework.ops.numpy(layer.weight) != before).all()
