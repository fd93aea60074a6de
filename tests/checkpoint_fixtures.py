"""Small networks and checkpoints with values that are lost easily, and whether arrays are the same bit for bit."""

from importlib.util import find_spec

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.checkpoint.store import CheckpointStore
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import sincos_positions_2d
from mindspeed_mm_dit.models.pretrained import KLArchitecture

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed here")
needs_diffusers = pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed here")

TINY = DiTConfig(input_size=8, num_classes=5, in_channels=4, hidden_size=16, num_layers=3, num_heads=2)
TINY_VAE = KLArchitecture(block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
                          up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4, layers_per_block=2)  # fmt: skip
MODEL_JSON = {
    "ae": {"model_id": "autoencoder_kl", "from_pretrained": "is not read"},
    "diffusion": {"model_id": "gaussian_diffusion"},
    "predictor": {
        "model_id": "dit", "input_size": 8, "num_classes": 5, "in_channels": 4, "hidden_size": 16,
        "num_layers": 3, "num_heads": 2,
    },
}  # fmt: skip
FILE_NAMES = {"pt": "a.pt", "safetensors": "a.safetensors", "original": "o.safetensors", "ckpt": "a.ckpt"}
FACTS = {"iteration": 7, "consumed_samples": 112, "seed": 3, "model": MODEL_JSON}


def random_arrays(shapes, seed):
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def dit_arrays(seed=0):
    return random_arrays(parameters_of(TINY).shapes(), seed) | {"pos_embed": sincos_positions_2d(16, 4)[None]}


def training_state():
    """A checkpoint with everything in it, and values that are lost easily."""
    trees = {"model": dit_arrays(0), "ema": dit_arrays(1), "optimizer": {}}
    trees["model"]["x_embedder.proj.bias"][:4] = [np.nan, -0.0, np.inf, 1e-45]
    for name, array in dit_arrays(2).items():
        if name != "pos_embed":
            trees["optimizer"] |= {f"state.{name}.step": np.array(7, np.float32)}
            trees["optimizer"] |= {f"state.{name}.exp_avg": array, f"state.{name}.exp_avg_sq": array**2}
    return State(trees, FACTS)


def write(folder, name, state):
    """Write ``state`` in the format ``name``, as another program would have; return where it is."""
    if name in ("pytorch", "mindspore"):
        store = CheckpointStore(folder / name)
        FORMATS[name].write(store.begin(7), state)
        store.commit(7, state.facts)
        return folder / name
    path = folder / FILE_NAMES.get(name, name)
    if name == "diffusers":
        path.mkdir()
    FORMATS[name].write(path, state)
    return path


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype and ours[name].shape == array.shape, name
        assert ours[name].tobytes() == array.tobytes(), name


def diffusers_dit():
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8,
                                 num_layers=3, sample_size=8, patch_size=2, num_embeds_ada_norm=5,
                                 norm_eps=1e-6).eval()  # fmt: skip
