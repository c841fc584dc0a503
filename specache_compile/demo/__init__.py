"""What a person sees first, `specache demo`: keys found, bytes and times of one real model, method by method."""
