"""Quantisation to few bits: levels between a group's minimum and maximum, the trellis code, and their scales."""
