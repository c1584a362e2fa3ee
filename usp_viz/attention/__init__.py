"""The real thing: unified sequence-parallel attention on torch.distributed."""
