"""Kernels, each beside its CPU twin and its contract lines."""
