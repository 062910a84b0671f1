"""Starts the ranks of a job on this machine, watches over them, and says how the job ended."""
