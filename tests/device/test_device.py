"""The device apart itself: what goes wrong on a GPU or an NPU goes wrong on it."""

import math

import pytest
import torch

from tests.device import counted

NPU = "npu"
pytestmark = counted.apart_alone


def ones(*size):
    return torch.ones(size or (4,), device=NPU)


def test_memory_is_nan_until_it_is_written():
    assert torch.empty(3, device=NPU).isnan().all() and torch.empty(3, dtype=torch.bfloat16, device=NPU).isnan().all()


@pytest.mark.parametrize("mistake", [
    lambda: ones() + torch.ones(4), lambda: torch.nn.functional.linear(torch.ones(2, 4), ones(3, 4)),
    lambda: torch.cat([ones(1), torch.ones(1)]), lambda: ones() + torch.ones(4, device="npu:1"),
    lambda: torch._foreach_add_([ones()], [torch.ones(4)]),
], ids=["operands", "a table", "one number", "another device", "a list"])  # fmt: skip
def test_tensors_of_two_places_do_not_meet(mistake):
    assert (ones() * torch.tensor(2.0)).tolist() == [2, 2, 2, 2]  # (a number of the host may)
    with pytest.raises(RuntimeError, match=r"same device|on a different device|two devices"):
        mistake()


def test_generator_draws_on_its_own_device_what_the_cpu_draws():
    for device in ("cpu", "npu:1"):
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(4, device=NPU, generator=torch.Generator(device))
    generators = map(torch.Generator, [NPU, "cpu"])
    assert torch.equal(*[torch.randn(4, device=g.device, generator=g.manual_seed(3)).cpu() for g in generators])


def test_copies_arrive_late_and_an_event_brings_what_was_copied_before_it_alone():
    host = torch.ones(4).pin_memory()
    there = host.to(NPU, non_blocking=True)
    host.fill_(2)
    assert there.tolist() == [2, 2, 2, 2]
    host = ones().to("cpu", non_blocking=True)
    assert host.is_pinned() and host.isnan().all()
    torch.npu.synchronize()
    assert host.tolist() == [1, 1, 1, 1]
    first = ones().to("cpu", non_blocking=True)
    event = torch.npu.Event()
    event.record()
    second = ones().to("cpu", non_blocking=True)
    assert [event.query(), event.query()] == [False, True]
    event.synchronize()
    assert first.sum() == 4 and math.isnan(second.sum())


def after(first, then):
    """Have ``then`` run on another stream, behind what ``first`` gives, and return both."""
    x, stream = first(), torch.npu.Stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        return x, then(x), stream


def test_streams_read_and_write_once_they_have_waited():
    x, y, stream = after(ones, lambda x: x + 1)
    for work, mistake in ((lambda: y + 1, "reads a tensor"), (lambda: x.add_(1), "writes a tensor")):
        with pytest.raises(RuntimeError, match=rf"{mistake} of shape \[4\] that stream \d+ "):
            work()
    torch.npu.current_stream().wait_stream(stream)
    assert (y + 1).tolist() == [3, 3, 3, 3] and x.add_(1).tolist() == [2, 2, 2, 2]


def test_memory_is_reused_once_nobody_reads_it():
    x, _, stream = after(ones, lambda x: x + 1)
    del x
    with pytest.raises(RuntimeError, match="memory of stream 0 that is free again is still used by stream"):
        ones()
    torch.npu.current_stream().wait_stream(stream)
    x, _, stream = after(ones, lambda x: x + 1)
    x.record_stream(stream)
    del x
    ones()


def waits(work):
    torch.npu.reset()
    work()
    return torch.npu.counts()["waits"]


@pytest.mark.parametrize(("work", "expected"), [
    (lambda x: x + 1, 0), (lambda x: x.sum().item(), 1), (lambda x: x.cpu(), 1),
    (lambda x: x.to("cpu", non_blocking=True), 0), (lambda x: torch.ones(4).to(NPU), 1),
    (lambda x: torch.ones(4).pin_memory().to(NPU, non_blocking=True), 0), (lambda x: x[x > 0], 1),
    (lambda x: x.nonzero(), 1), (lambda x: torch.equal(x, x), 1), (lambda x: torch.npu.synchronize(), 1),
    (lambda x: torch.nn.utils.clip_grad_norm_([x], 1.0), 0),
])  # fmt: skip
def test_waits_of_the_host_are_counted(work, expected):
    x = ones()
    assert waits(lambda: work(x)) == expected, torch.npu.counts()["waited_at"]


def test_last_event_of_a_queue_is_waited_for():
    event = torch.npu.Event()

    def work(behind):
        ones()
        event.record()
        if behind:
            ones()
        event.synchronize()

    assert [waits(lambda: work(True)), waits(lambda: work(False))] == [0, 1]


def test_operators_bytes_and_memory_are_counted():
    before = torch.npu.counts()["device_bytes"]
    x = torch.ones(256).pin_memory().to(NPU, non_blocking=True)
    with torch.no_grad():
        torch._foreach_mul_([x, x.clone()], 2.0)
        torch.nn.functional.layer_norm(x, (256,)).cpu()
    found = torch.npu.counts()
    assert found["operators"] == {"aten::copy_": 1, "aten::_foreach_mul_": 1, "aten::native_layer_norm": 1}
    assert found["bytes_to_device"] == found["bytes_to_host"] == found["most_pinned_bytes"] == 1024
    assert found["pinned_bytes"] == 0, "it has arrived"
    assert 4 * 1024 >= found["most_device_bytes"] - before >= 2 * 1024
