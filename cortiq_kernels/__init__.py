"""cortiq_kernels: shrink, specialise and heal an open language model with an explicit training step.

    model/  data/  ->  step/ (calls ops/)  ->  recipes/  ->  cli

`ops` holds the operators (formula, reference, forward, backward), `model` reads and writes Hugging Face directories,
`data` turns records into batches, `step` is the explicit forward, backward and update, and `recipes` are the runs a
user starts. Importing this package defines names and does nothing else: no torch import, no device query, no
compilation.
"""

from cortiq_kernels._version import __version__

__all__ = ["__version__"]
