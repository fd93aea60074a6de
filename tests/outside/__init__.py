"""A predictor and an objective as another package brings them."""
