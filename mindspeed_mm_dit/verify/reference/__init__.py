"""Files of reference values: one file here for each kind of them."""
