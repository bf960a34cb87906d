"""The benchmark: kernels and strategies, ours and others', on the same cases, side by side."""
