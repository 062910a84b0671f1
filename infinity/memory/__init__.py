"""May these bytes live here: the ledger, arenas, the buffer pool, transfers to and from the compute device, host limits."""
