"""Caches that come from elsewhere or go elsewhere: held, saved, loaded, made plain."""
