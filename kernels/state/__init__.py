"""The tiers' state tensors: layout, groups, rotation, centers, pages; and the cursor with their lengths."""
