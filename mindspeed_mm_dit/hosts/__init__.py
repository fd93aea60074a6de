"""Hosts: the programs that run a training. A run chooses one at its start: the standalone host or MindSpeed-MM's."""
