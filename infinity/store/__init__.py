"""Where each shard's bytes are now: layout, extents, run directories, swap files and the tiles in them."""
