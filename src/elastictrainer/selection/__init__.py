"""The best plan within a budget: exact, pure, in milliseconds."""
