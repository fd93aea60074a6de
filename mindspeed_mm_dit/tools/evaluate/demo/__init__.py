"""The demo's data sets, made from scikit-learn's digits: a program can tell what their images and clips show."""
