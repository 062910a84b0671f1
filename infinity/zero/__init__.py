"""Units, flat shards, gathered weights, the unit's autograd node, and the two schedules. Knows no optimizer."""
