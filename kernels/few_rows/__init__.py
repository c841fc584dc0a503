"""A product of few rows with a weight."""
