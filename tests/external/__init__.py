"""A predictor, an objective and an optimizer as another package brings them."""
