"""The strategies, one idea per file: each a pure function of the world's shape to a Plan."""
