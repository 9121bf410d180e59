"""Optimizers, schedulers and windows of accumulation, as prepared."""
