"""What is done to a plan: made ready for heads, mask and layout, checked, pruned, lowered.

shards: heads, mask and layout meet the plan; liveness: until when buffers are needed; symmetry:
which ranks are alike; program: the result, what one rank does.
"""
