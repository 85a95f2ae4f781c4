"""Training: configuration, the loop, checkpoints, ranks, the log."""
