"""Efficient nonparametric decomposition of binary and count tensors (ENTED, AAAI-24)."""
