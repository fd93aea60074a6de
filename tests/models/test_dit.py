import hashlib

import torch

from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from tests.conftest import GOLDEN

TINY = DiTConfig(input_size=8, num_classes=10, in_channels=4, patch_size=2, hidden_size=64, num_layers=2, num_heads=4)

FIRST_DRAWN = "4f0cab7e364ae5d3c628c891043280513d109db935b40306fb21917bc22ac859"


def initialised(config: DiTConfig, seed: int = 0) -> DiT:
    model = DiT(config)
    runtime.load_arrays(model, initial_weights(parameters_of(config), seed))
    return model


def test_state_dict_keys_and_shapes_are_the_published_ones():
    published = read_weights(GOLDEN / "dit_tiny_p2.pt")
    assert {n: tuple(v.shape) for n, v in DiT(TINY).state_dict().items()} == {n: a.shape for n, a in published.items()}


def test_at_the_start_every_block_is_the_identity_and_the_output_zero():
    model = initialised(TINY)
    x, c = torch.randn(2, 16, 64), torch.randn(2, 64)
    assert torch.equal(model.blocks[1](x, c), x)
    output = model(torch.randn(2, 4, 8, 8), torch.tensor([3, 999]), torch.tensor([0, 10]))
    assert output.shape == (2, 8, 8, 8) and output.abs().max() == 0


def test_the_initial_weights_of_a_dit_keep_every_bit():
    """A digest of all that is trained, as it was first drawn."""
    weights = initial_weights(parameters_of(TINY), 1234)
    trained = sorted(parameters_of(TINY).shapes(trained_only=True))
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in trained)).hexdigest()
    assert digest == FIRST_DRAWN


def test_the_composite_gives_one_loss_a_sample(model_json):
    model = DiTModel(model_config_from_mapping(model_json, "model.json"))
    batch = {
        "pixels": torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8),
        "labels": torch.tensor([0, 9, 10]),
        "timesteps": torch.tensor([0, 500, 999]),
        "noise": torch.randn(3, 1, 8, 8),
    }
    loss = model(**batch)
    assert loss.shape == (3,) and torch.isfinite(loss).all()
    alone = model(**{key: value[1:2] for key, value in batch.items()})
    torch.testing.assert_close(alone, loss[1:2], rtol=1e-5, atol=0)
