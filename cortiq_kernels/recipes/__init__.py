"""recipes: see the package docstring."""
