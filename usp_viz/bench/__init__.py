"""Measure this machine: medians and ratios from interleaved runs, never a test."""
