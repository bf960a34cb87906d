"""The reduction with the same bits at any split: every row is summed by one rank, in one call.

passes   which plans serve it, and the passes of a call under them
blocks   the fixed blocks of a document, and which of them a call's rows meet
kernel   attention of whole rows, block by block in the order of positions, on the CPU
triton_kernel    the same on CUDA, and trial, which has it prove its bits on a machine
"""
