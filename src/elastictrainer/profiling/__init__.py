"""Trace one real step, time and weigh its parts, calibrate on real plans, cache on disk."""
