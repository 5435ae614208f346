"""Families of functions that a layer is a sum of: values and derivatives, on the device and in torch."""
