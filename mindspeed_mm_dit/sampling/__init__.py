"""Generate images and videos with a trained model."""
