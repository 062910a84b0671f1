"""Can training run on this machine, and what holds it back: one check a line, each with what to do about it."""
