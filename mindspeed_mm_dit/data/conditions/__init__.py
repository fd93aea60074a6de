"""What steers a prediction, from a sample's items to the arrays of a batch, and from these to what a network takes."""
