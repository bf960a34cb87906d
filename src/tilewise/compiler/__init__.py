"""What is done to a plan: checked, pruned, and lowered to one program for each rank."""
