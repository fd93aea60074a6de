"""Two ranks share the tokens of a sample: which each has, and that their averaged gradients are those of one rank."""

import os
import traceback
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_mm_dit.framework.pytorch import sequence

pytestmark = pytest.mark.ranks
B, N, HEADS, WIDTH = 2, 6, 4, 3
X, TARGET = map(torch.from_numpy, np.random.default_rng(0).standard_normal((2, B, N, HEADS * WIDTH)))


def on_two_ranks(work, folder):
    """Return what ``work`` returns here, as the first rank, and in a process forked off this one, as the second."""
    child = os.fork()
    rank = int(child == 0)
    try:
        store = dist.FileStore(str(folder / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=1))
        sequence.set_context_parallel_group(dist.group.WORLD, "cpu")
        found = [None, None]
        dist.all_gather_object(found, work())
        return found
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if child == 0:
            os._exit(0)
        sequence.set_context_parallel_group(None, "cpu")
        dist.destroy_process_group()
        os.waitpid(child, 0)


def heads_of(x):
    """(B, n, heads * d) -> (B, heads, n, d)."""
    return x.unflatten(2, (-1, WIDTH)).transpose(1, 2)


def gradients():
    """Return the gradients of weights before, between and behind what moves tokens, and the loss."""
    before, part, behind = (torch.full((12,), value, dtype=X.dtype, requires_grad=True) for value in (2, 3, 5))
    x = sequence.split_tokens(X * before) * part
    x = sequence.tokens_to_heads(heads_of(x))
    x = sequence.heads_to_tokens(x * x.cumsum(2))  # of every token before it
    x = sequence.gather_tokens(x.transpose(1, 2).flatten(2) * part)
    loss = (x * behind * TARGET).sum()
    loss.backward()
    return [weight.grad.numpy() for weight in (before, part, behind)], loss.item()


def test_each_rank_has_its_part_of_the_tokens_then_every_token_of_its_heads_and_back(tmp_path):
    def work():
        tokens = sequence.split_tokens(X)
        heads = sequence.tokens_to_heads(heads_of(tokens))
        back = sequence.heads_to_tokens(heads).transpose(1, 2).flatten(2)
        assert sequence.context_parallel_size() == 2
        return [part.numpy() for part in (tokens, heads, back, sequence.gather_tokens(back))]

    assert sequence.context_parallel_size() == 1
    for rank, (tokens, heads, back, whole) in enumerate(on_two_ranks(work, tmp_path)):
        np.testing.assert_array_equal(tokens, X[:, 3 * rank : 3 * rank + 3])
        np.testing.assert_array_equal(heads, heads_of(X)[:, 2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(back, tokens)
        np.testing.assert_array_equal(whole, X)


def test_gradients_averaged_over_the_ranks_are_those_of_one(tmp_path):
    wanted, loss = gradients()
    found = on_two_ranks(gradients, tmp_path)
    assert [one for _, one in found] == pytest.approx([loss, loss], rel=1e-12)
    for weight, own in enumerate(wanted):
        np.testing.assert_allclose(np.mean([grads[weight] for grads, _ in found], 0), own, rtol=1e-12)
