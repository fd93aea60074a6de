"""The networks, written once for all frameworks: predictor, autoencoder, and the composite that trains."""
