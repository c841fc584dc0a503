"""The time of a step, computed: by the roofline and by events."""
