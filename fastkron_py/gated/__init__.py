"""Gated linear layers and MLPs: ``up * act(gate)`` in one matrix product."""
