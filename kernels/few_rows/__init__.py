"""Product of few rows and a weight."""
