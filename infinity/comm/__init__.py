"""Ranks that work together: process groups, collectives as handles with one order of sums, and the watch over the other ranks."""
