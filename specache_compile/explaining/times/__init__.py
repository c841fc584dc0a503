"""The time of a step, computed: launch by launch."""
