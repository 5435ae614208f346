"""Layers (`torch.nn.Module`) over the functional room."""
