"""torch_xla on its CPU device; `make test-tpu` brings the environment."""
