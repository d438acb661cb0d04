"""Time, memory, FLOPs and energy, measured."""
