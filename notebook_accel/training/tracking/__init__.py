"""Trackers of metrics (TensorBoard, MLflow, ...), progress bars and profiling."""
