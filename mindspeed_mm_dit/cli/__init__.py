"""The ``mm-dit`` command line. Each command is a module with HELP, add_arguments and run."""
