"""A cache from outside and to the outside: held, saved, loaded, made plain."""
