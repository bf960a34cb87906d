"""Measuring this machine: kernels, links and the executor, into a Machine that predicts runs."""
