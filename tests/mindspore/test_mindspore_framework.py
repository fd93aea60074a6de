"""What MindSpore alone has to do for the names of the contract: versions, compilation, ranks."""

import os
import subprocess
import sys

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


def test_an_optimizer_step_makes_no_constants_of_the_gradients(mindspore, framework, monkeypatch):
    """Constants would be compiled in anew at every step, and each of their numbers printed."""
    from mindspore.graph import api

    said = []
    monkeypatch.setattr(api.logger, "warning", lambda text, *given: said.append(text))
    layer = framework.nn.Linear(3, 2)
    framework.optim.adamw_step(layer, lambda: layer(framework.ops.tensor(draw(4, 3))).mean(axis=1), lr=1e-3)
    assert said == []


RANKS = """
import numpy as np
from mindspeed_mm_dit import framework
framework.activate("mindspore")
from mindspeed_mm_dit.framework import ops, runtime
runtime.initialize("gloo", 2, 8)
rank, mean = runtime.rank(), runtime.mean_over_ranks([ops.tensor(np.float32(runtime.rank()))])[0]
print("RANK", rank, runtime.world_size(), float(mean.asnumpy()), runtime.any_rank(rank == 1), runtime.any_rank(False),
      runtime.each_on_any_rank([False, rank == 1]), runtime.num_microbatches(), flush=True)
runtime.barrier()
runtime.shutdown()
"""


def test_two_ranks_of_msrun_average_and_agree(mindspore, tmp_path):
    (tmp_path / "job.py").write_text(RANKS)
    bin_folder = os.path.dirname(sys.executable)
    port = 20_000 + os.getpid() % 10_000
    environment = os.environ | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    subprocess.run(
        [f"{bin_folder}/msrun", "--worker_num=2", "--local_worker_num=2", f"--master_port={port}", "--join=True",
         f"--log_dir={tmp_path}/log", str(tmp_path / "job.py")],
        check=True, capture_output=True, timeout=300, env=environment, cwd=tmp_path,
    )  # fmt: skip
    lines = [line for log in tmp_path.glob("log/worker_*.log") for line in log.read_text().splitlines()]
    assert sorted(line for line in lines if line.startswith("RANK")) == [
        "RANK 0 2 0.5 True False [False, True] 2", "RANK 1 2 0.5 True False [False, True] 2",
    ]  # fmt: skip
