"""Stored compilations: the traces of one process, for later processes that then trace nothing."""
