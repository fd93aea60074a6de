"""The networks, once for every framework: predictor, autoencoder and the composite that trains."""
