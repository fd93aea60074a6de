"""The feature path with random weights: torch-fidelity's network, and none of the published file, which is not here."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.tools.evaluate import inception
from mindspeed_mm_dit.tools.evaluate.image_set import open_image_set
from mindspeed_mm_dit.tools.evaluate.inception import Inception
from tests.inception_fixtures import write_random_weights

has_network = importlib.util.find_spec("torch_fidelity") is not None
needs_network = pytest.mark.skipif(not has_network, reason="pip install --no-deps torch-fidelity")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return write_random_weights(tmp_path_factory.mktemp("inception") / "random.pth")


@pytest.fixture
def images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "set.npz", images)
    return open_image_set("--samples", tmp_path / "set.npz")


@needs_network
def test_features_are_those_of_the_layers_of_adm(weights, images):
    found = Inception(weights).features(images, batch_size=3)
    (images,) = images.batches(3)
    names, network_class = ["2048", "logits_unbiased"], inception._network_class()
    network = network_class("again", names, feature_extractor_weights_path=str(weights))
    seen = {}
    network.Mixed_6c.register_forward_hook(lambda module, given, made: seen.update(mixed_5=made.clone()))
    with torch.no_grad():
        pool, logits = network(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
        spatial = network.Mixed_6d.branch1x1(seen["mixed_5"])[:, :7].permute(0, 2, 3, 1).flatten(1)
    np.testing.assert_array_equal(found.pool, pool.numpy())
    np.testing.assert_allclose(found.logits, logits.numpy(), rtol=1e-4, atol=1e-6)  # (float32, another order)
    np.testing.assert_array_equal(found.spatial, spatial.numpy())
    assert found.pool.shape == (3, 2048) and found.spatial.shape == (3, 2023) and found.logits.shape == (3, 1008)
    assert (found.spatial >= 0).all() and (found.spatial > 0).any()  # behind the ReLU


@needs_network
@pytest.mark.extended
def test_features_do_not_depend_on_the_batch(weights, images):
    network = Inception(weights)
    assert "torch_fidelity" not in sys.modules and "torchvision" not in sys.modules
    whole, parts = network.features(images, 3), network.features(images, 2)
    np.testing.assert_allclose(whole.pool, parts.pool, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whole.spatial, parts.spatial, rtol=1e-4, atol=1e-5)
    grey = np.random.default_rng(1).integers(0, 256, (2, 8, 8, 1), np.uint8)
    np.testing.assert_array_equal(network.of_batch(grey)[0], network.of_batch(np.repeat(grey, 3, 3))[0])


@needs_network
def test_weights_of_no_inception_are_refused(tmp_path, monkeypatch):
    of_torchvision, of_another_network = ({"fc.weight": torch.zeros(rows, 2048)} for rows in (1000, 1008))
    a_pickle = b"\x80\x02]q\x00."
    for content in (of_torchvision, of_another_network, [torch.zeros(2)], b"", b"not a pickle", a_pickle):
        if isinstance(content, bytes):
            (tmp_path / "w.pth").write_bytes(content)
        else:
            torch.save(content, tmp_path / "w.pth")
        with pytest.raises(CheckpointError, match=r"w\.pth"):
            Inception(tmp_path / "w.pth")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlatformError, match="torch-fidelity"):
        Inception(tmp_path / "w.pth")


class Evil:
    def __reduce__(self):
        return open, (Evil.target, "w")


@needs_network
@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_weights_file_is_not_run(tmp_path, zipped):
    Evil.target = str(tmp_path / "was_run")
    torch.save({"fc.weight": Evil()}, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    (tmp_path / "was_run").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"w\.pth.*code") as raised:
        Inception(tmp_path / "w.pth")
    assert "weights_only" not in str(raised.value), "PyTorch's advice is to run it"
    assert not (tmp_path / "was_run").exists()
