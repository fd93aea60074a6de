"""Pixels, text states and latents are MindSpeed-MM's, by its own classes' numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_mm_dit.evaluation.compare import relative_error
from tests.conftest import GOLDEN


@pytest.fixture(scope="module")
def given():
    with np.load(GOLDEN / "t2v_tiny.npz") as file:
        return dict(file)


@pytest.fixture
def parity(framework):
    """The checks, on the framework of this test run."""
    from mindspeed_mm_dit.evaluation import parity_clips

    return parity_clips


@pytest.fixture
def on_pytorch(framework):
    if framework.active() != "pytorch":
        pytest.skip("Wan's autoencoder and UMT5 run on PyTorch")


def check(quantities, names):
    found = list(quantities)
    assert [name for name, _, _ in found] == names
    for name, ours, theirs in found:
        if name.endswith("resized"):
            assert np.abs(ours.astype(int) - theirs).max() <= 1, name  # level of 255
        else:
            assert relative_error(ours, theirs) < 1e-5, name


def test_frames_become_the_same_pixels(parity, given):
    check(parity.prep(given), [f"prep/{video}/{kind}" for video in "abc" for kind in ("resized", "output")])


def test_the_autoencoder_is_the_same(on_pytorch, parity, given):
    from mindspeed_mm_dit.configs.autoencoder_kl_wan import WanVAEConfig
    from mindspeed_mm_dit.models.autoencoder_kl_wan import AutoencoderKLWan

    autoencoder = AutoencoderKLWan(WanVAEConfig(str(GOLDEN / "wan_vae_tiny")))
    check(parity.vae(given, autoencoder), ["vae/mean", "vae/logvar", "vae/mm_latents", "vae/decoded"])


def test_the_text_encoder_is_the_same_with_its_padding(on_pytorch, parity, given):
    pytest.importorskip("transformers", reason="requirements/video.txt")
    from mindspeed_mm_dit.configs.text_encoder import TextEncoderConfig
    from mindspeed_mm_dit.models.umt5_pytorch import UMT5

    network = UMT5(TextEncoderConfig(str(GOLDEN / "umt5_tiny"), dtype="fp32"))
    check(parity.umt5(given, network), ["umt5/last_hidden_state", "umt5/mm_embeds"])
