"""Muon: its matrices, and steps held to PyTorch's own (tests/golden/data/README.md), on either framework."""

import numpy as np
import pytest

from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.optimizers import adam, muon
from mindspeed_mm_dit.optimizers.muon import MuonConfig, orthogonalize
from tests.conftest import GOLDEN


@pytest.fixture
def room(framework):
    """The module that recomputes such a file; it is imported once a framework is active."""
    from mindspeed_mm_dit.tools.verify.reference import file as module

    return module


def compare(*given):
    from mindspeed_mm_dit.tools.verify import parity

    return parity.compare(*given)


def test_the_dit_says_which_of_its_weights_are_how_many_matrices():
    config = DiTConfig(input_size=8, num_classes=10, hidden_size=32, num_layers=1, num_heads=2)
    matrices = {name: p.matrices for name, p in parameters_of(config).items() if p.matrices}
    block = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1, "adaLN_modulation.1": 6}
    ends = {"t_embedder.mlp.0": 1, "t_embedder.mlp.2": 1, "final_layer.adaLN_modulation.1": 2}
    wanted = {**ends, **{f"blocks.0.{name}": count for name, count in block.items()}}
    assert matrices == {f"{name}.weight": count for name, count in wanted.items()}
    for name, p in parameters_of(config).items():
        assert muon.rule_of(MuonConfig(), p) is (muon.RULE if name in matrices else adam.RULE), name


@pytest.mark.parametrize("shape", [(3, 12, 8), (2, 8, 12), (1, 16, 16)])
def test_singular_values_come_near_1_in_the_same_directions(framework, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = framework.ops.numpy(orthogonalize(framework.ops.tensor(x), 5))
    assert not framework.ops.numpy(orthogonalize(framework.ops.tensor(0 * x), 5)).any()
    for matrix, made in zip(x, found):
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        of_directions = u.T @ made @ v.T
        np.testing.assert_allclose(of_directions, np.diag(np.diag(of_directions)), atol=2e-4)
        assert np.diag(of_directions)[s > 0.05 * np.linalg.norm(s)].min() > 0.5 and np.diag(of_directions).max() < 1.3


def test_every_value_of_the_golden_file_is_met(framework):
    """An iteration in bfloat16 is no nearer than a tenth of the change to any other."""
    found = {finding.name: finding for finding in compare(GOLDEN / "muon_tiny.npz", None, 1e-5, 1e-12)}
    assert len(found) == 63 and all(finding.good for finding in found.values())
    for name, finding in found.items():
        assert finding.error < (0.1 if name.startswith("bfloat16/") else 1e-5), finding


def test_in_float64_a_step_is_the_same(framework, room, monkeypatch, tmp_path):
    """MindSpore rounds a number that stands beside a tensor to float32."""
    monkeypatch.setattr(room.Muon, "dtype", np.float64)
    bound = 1e-12 if framework.active() == "pytorch" else 5e-6
    for finding in compare(part(tmp_path, "float64/original/tall", "float64/momentum_buffer/tall"), None, 1e-5, 1e-12):
        assert finding.error < bound, finding


def part(folder, *names, **more):
    """Write the golden file with these results alone, and other arrays."""
    with np.load(GOLDEN / "muon_tiny.npz") as file:
        inputs = {name: file[name] for name in file if "/" not in name or name.endswith(("/tall", "/square"))}
        given = {name: array for name, array in inputs.items() if name[:6] in ("param/", "grad/t", "grad/s")}
        settings = {name: array for name, array in inputs.items() if "/" not in name}
        np.savez(folder / "part.npz", **settings, **given, **{name: file[name] for name in names}, **more)
    return folder / "part.npz"


def test_a_planted_fault_is_seen(room, monkeypatch, tmp_path):
    monkeypatch.setattr(room, "scale_of", lambda mode, rows, columns: muon.scale_of(mode, columns, rows))
    names = ("original/tall", "bfloat16/original/tall", "original/square")
    found = compare(part(tmp_path, *names), None, 1e-5, 1e-12)
    assert {finding.name: finding.good for finding in found} == dict(zip(names, (False, False, True)))


@pytest.mark.parametrize(("key", "shape", "words"), [
    ("original/other", (5, 4, 4), "param/other: is missing"),
    ("original/square_split3", (5, 16, 16), "cannot be split into 3 matrices of the same height: it has 16 rows"),
    ("halved/square", (5, 16, 16), "halved/square: is no quantity"),
    ("bfloat16/original/wide", (5, 16, 15), "param/wide: is missing"),
])  # fmt: skip
def test_impossible_file_is_refused(framework, tmp_path, key, shape, words):
    with pytest.raises(CheckpointError, match=words):
        compare(part(tmp_path, **{key: np.zeros(shape, np.float32)}), None, 1e-5, 1e-12)
