"""What goes between host and device arrives before it is read, and random numbers are drawn where they belong."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mindspeed_mm_dit as dit
from tests.device import counted
from tests.device.steps import Steps, narrow


@pytest.fixture
def steps():
    return Steps(narrow("digits_flow"))


@counted.apart_alone  # (a GPU may be as quick as the host)
def test_scalars_are_read_once_they_have_arrived(framework):
    pending = framework.runtime.read_later([torch.ones((), device=counted.KIND), torch.tensor(2.0)])
    assert not pending.is_ready() and pending.wait() == [1, 2]


def test_batch_may_be_made_anew_while_it_is_copied(framework):
    array = np.ones((2, 3), np.float32)
    batch = framework.runtime.to_device({"x": array})
    array.fill(2)
    assert batch["x"].tolist() == np.ones((2, 3)).tolist()


def test_checkpoint_holds_the_weights_of_its_beginning(steps, framework):
    from mindspeed_mm_dit.checkpoint.torch_dcp import _copied, _wait_for_copies

    before = steps.weights()
    counted.reset()
    copies = _wait_for_copies(_copied(steps.engine.state()))
    if counted.KIND == "npu":  # (PyTorch does not warn of a wait for all of a GPU's work)
        assert counted.counts()["waits"] == 1, counted.counts()["waited_at"]
    steps.step()
    assert all(torch.equal(copies["model"][name], weight) for name, weight in before.items())


def test_roundings_of_a_proof_are_drawn_by_one_generator(steps):
    from mindspeed_mm_dit.tools.verify.pytorch_steps import RoundingNoise

    RoundingNoise(steps.engine, 1e-6, 0.0, 0).begin()
    assert steps.step().isfinite()


@counted.apart_alone
def test_witness_copies_chosen_entries_to_the_host(tmp_path):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(2048, 2048).to(counted.KIND), torch.randn((4, 2048)).to(counted.KIND)
    optimizer, before = torch.optim.SGD(model.parameters(), 0.0), model.weight.detach().clone()
    counted.reset()
    with dit.record_trace(model, optimizer, tmp_path / "w") as w:
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            w.step(loss)
    assert counted.counts()["bytes_to_host"] < 0.1 * model.weight.nbytes and torch.equal(model.weight, before)


def test_flags_of_ranks_meet_on_the_host(framework):
    """As MindSpeed-MM's native engine does."""
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = framework.runtime.check_backend(None)
    device = torch.device(counted.KIND, 0)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", device_id=device, **alone)
    try:
        framework.runtime.divide_among_ranks(4, 4)
        assert framework.runtime.any_over_ranks(True) and dist.group.WORLD.bound_device_id == device
    finally:
        framework.runtime.shutdown()
