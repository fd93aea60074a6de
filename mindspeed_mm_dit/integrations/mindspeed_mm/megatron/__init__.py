"""The host on MindSpeed-MM's old route, Megatron: our composite, batches and state inside its ``pretrain``.

Before this host is chosen, code outside this package imports only ``record``.
"""
