import torch

from mindspeed_mm_dit.objectives.guidance import projection_loss


def test_projections_along_the_features_have_the_least_loss():
    features = [torch.randn(3, 4, width) for width in (5, 7)]
    exact = [2.5 * feature for feature in features]
    torch.testing.assert_close(projection_loss(exact, features, [1, 1]), torch.full((3,), -1.0))
    torch.testing.assert_close(projection_loss([exact[0], -exact[1]], features, [1, 1]), torch.zeros(3))
    torch.testing.assert_close(projection_loss(exact, features, [0.5, 2]), torch.full((3,), -1.25))


def test_each_sample_has_a_loss_of_its_own():
    features = torch.randn(3, 4, 5)
    signs = torch.tensor([1.0, -1, 1])
    torch.testing.assert_close(projection_loss([features * signs[:, None, None]], [features], [1]), -signs)
