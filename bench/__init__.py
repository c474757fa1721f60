"""Benchmarks: bits first, then time."""
