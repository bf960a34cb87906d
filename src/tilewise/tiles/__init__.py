"""A tile of a plan meets layout and mask: the few kernel calls that compute it.

cover: finds the calls, by the allowed cells as slices, rectangles and squares; calls: the value;
call_rows: which rows of which shard a call reads.
"""
