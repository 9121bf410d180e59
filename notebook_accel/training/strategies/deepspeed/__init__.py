"""DeepSpeed's ZeRO, behind the interface of a strategy."""
