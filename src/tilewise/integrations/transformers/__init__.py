"""Models and Trainers of transformers: hf is the interface, accelerate splits a Trainer."""
