"""What a plan is: items, transfers, tiles and steps.

ir: the values; builder: one rank's steps, written; payload: the tensors of an item in each pass;
text, grid and json: written forms; shifts: ranks that are alike; cache: values derived from a plan.
"""
