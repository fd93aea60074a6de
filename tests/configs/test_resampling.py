"""Patches of another size: what is embedded, and what is answered, stays what it was."""

import numpy as np
import pytest

from mindspeed_mm_dit.models.dit_adapter import resize_matrix, resized_input, resized_output

SIZES = [(1, 2), (1, 3), (2, 3), (2, 4), (2, 8), (3, 4), (4, 7)]
DRAW = np.random.default_rng(0)


def test_growing_is_bilinear_interpolation_of_pytorch():
    functional = pytest.importorskip("torch.nn.functional")
    import torch

    grown = [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]  # centres at -0.25, 0.25, 0.75, 1.25; edges repeated
    np.testing.assert_allclose(resize_matrix(2, 4), grown, atol=1e-15)
    for before, after in SIZES:
        patch = torch.tensor(DRAW.standard_normal((1, 1, before, before)))
        theirs = functional.interpolate(patch, (after, after), mode="bilinear", align_corners=False)[0, 0].numpy()
        matrix = resize_matrix(before, after)
        np.testing.assert_allclose(matrix @ patch[0, 0].numpy() @ matrix.T, theirs, atol=1e-12)


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_a_grown_patch_is_embedded_as_the_patch_it_was_made_of(before, after):
    weight, patch = DRAW.standard_normal((5, 3, before, before)), DRAW.standard_normal((3, before, before))
    matrix = resize_matrix(before, after)
    token = np.einsum("dcij,cij->d", weight, patch)
    grown = np.einsum("dcij,cij->d", resized_input(weight, after), matrix @ patch @ matrix.T)
    np.testing.assert_allclose(grown, token, atol=1e-10)


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_answer_is_the_resized_answer_and_shrinks_back(before, after):
    weight, token = DRAW.standard_normal((before, before, 2, 5)), DRAW.standard_normal(5)
    for start, end in ((before, after), (after, before)):
        matrix, there = resize_matrix(start, end), weight if start == before else resized_output(weight, after)
        answer = np.einsum("ip,jq,pqc->ijc", matrix, matrix, there @ token)
        np.testing.assert_allclose(resized_output(there, end) @ token, answer, atol=1e-10)
    weight = DRAW.standard_normal((4, 3, before, before))
    np.testing.assert_allclose(resized_input(resized_input(weight, after), before), weight, atol=1e-10)
    answer = DRAW.standard_normal((before, before, 3, 4))
    np.testing.assert_allclose(resized_output(resized_output(answer, after), before), answer, atol=1e-10)
