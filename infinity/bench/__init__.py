"""Benchmarks of the parts that decide the speed of training, measured through the very code that training uses."""
