"""Denominators of the rational function, by version: values and derivatives, on the device and in torch."""
