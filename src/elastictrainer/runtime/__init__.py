"""The only code that touches a model: apply a plan, train, re-plan, checkpoint."""
