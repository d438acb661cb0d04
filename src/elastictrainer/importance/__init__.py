"""How much training a tensor now would lower the loss."""
