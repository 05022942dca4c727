"""report: see the package docstring."""
