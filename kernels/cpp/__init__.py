"""What all C++ kernels share: how they are compiled, tiles and vectors."""
