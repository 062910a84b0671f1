"""Checkpoints and exports, written and read one tile at a time; a committed checkpoint is a manifest renamed in last."""
