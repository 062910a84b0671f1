"""What happened and when: counters and spans, and the files they are written to. Knows no reader and no torch."""
