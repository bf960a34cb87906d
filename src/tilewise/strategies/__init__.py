"""The strategies, one idea per file: each a pure function of the world's shape to a Plan.

catalog: all of them in one table; mesh_schedules: the order of a mesh tile's work; tiling: who
computes which block of a mask-aware plan.
"""
