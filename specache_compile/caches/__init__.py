"""Operations on caches: hold, save, load, join, split, materialize."""
