"""What a captured graph says: its attentions, masks, sizes, weights."""
