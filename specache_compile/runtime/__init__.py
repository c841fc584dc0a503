"""What a rewritten graph runs on: sessions, their state tensors, the held tensors that stand for them."""
