"""Ranks that work together: process groups, collectives as handles with one order of sums, a watch over the other ranks."""
