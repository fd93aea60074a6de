"""The meta backend: ``nn`` and ``ops`` that compute shapes only, without a tensor library.

A network runs here to find its cost: parameters, multiply-adds, and the memory that backward needs for a sample.
``binding`` imports a network's file for the meta backend, in addition to the copy that the active framework uses;
``trace`` records a forward pass.
"""
