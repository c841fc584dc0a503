"""Pairs on the move: selected, fetched, corrected, offloaded, appended; and the queue and stream that carry them."""
