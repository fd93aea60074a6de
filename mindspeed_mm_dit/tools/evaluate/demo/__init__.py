"""The demo data sets, made from scikit-learn's digits, so that a classifier can judge generated images and clips."""
