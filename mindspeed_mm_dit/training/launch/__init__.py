"""How examples/dit/pretrain.sh starts the processes of a run: alone, by torchrun or by msrun. No framework."""
