"""Paper: the third framework. ``nn`` and ``ops`` on shapes alone, without a tensor library.

A network runs here to answer what it costs: its parameters, multiply-adds, and what backward keeps of a sample.
``binding`` imports a network's file for the meta backend, beside the copy that the active framework uses; ``trace`` records a
forward pass.
"""
