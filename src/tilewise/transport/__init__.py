"""How messages get from rank to rank: process groups, threads, and what ranks agree on."""
