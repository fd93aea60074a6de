"""Random weights for torch-fidelity's Inception: the published file is not here."""

import io

import pytest


def write_random_weights(path):
    """Write them in the format before PyTorch 1.6, as the published file is; return ``path``."""
    import torch

    from mindspeed_mm_dit.tools.evaluate import inception

    network_class, held = inception._network_class(), io.BytesIO()
    torch.save({}, held)
    held.seek(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_class, "load_state_dict", lambda self, state: None)
        torch.manual_seed(0)
        network = network_class("random", ["2048"], feature_extractor_weights_path=held)
    torch.save(network.state_dict(), path, _use_new_zipfile_serialization=False)
    return path
