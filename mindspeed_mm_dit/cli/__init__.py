"""The ``mm-dit`` command line. Each command is a module with DESCRIPTION, add_arguments and run."""
