"""step: see the package docstring."""
