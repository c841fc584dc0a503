"""How numbers become few bits: levels between a group's ends, a trellis, and the scales beside both."""
