"""Training steps and predictions of GPyTorch."""
