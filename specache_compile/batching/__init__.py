"""Many requests at once through one compiled model, without a server: `specache_compile.Batch`."""
