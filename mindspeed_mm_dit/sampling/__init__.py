"""From a trained model and a list of labels to images."""
