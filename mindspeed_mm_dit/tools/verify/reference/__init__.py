"""The kinds of files of reference values, one module each."""
