"""Prepared optimizers and schedulers, and gradient accumulation."""
