"""Thin adapters of the controller to other people's loops."""
