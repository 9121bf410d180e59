"""TPUs by torch_xla, behind the interface of a strategy."""
