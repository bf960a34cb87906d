"""A program run on tensors, forward and backward.

A call goes through torch_op, problem (its checks), forward_backward, pass_run (one pass made ready)
and executor (the loop over instructions). work keeps a rank's operands and partials its results;
gather binds kernel calls to rows; packing is rows as bytes; allocator and memory_plan give buffers.
"""
