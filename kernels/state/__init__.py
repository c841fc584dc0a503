"""What the tiers hold: places, bits, groups, rotation; and the cursor that says how much."""
