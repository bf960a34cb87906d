"""The planner's parts: what it tries, what it knows before trying, and what it hands out."""
