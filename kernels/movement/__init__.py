"""Movement of pairs between tiers: append, offload, select, fetch, correct; and the copy stream."""
