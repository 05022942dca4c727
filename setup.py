"""Metadata lives in pyproject.toml; this file is where the native module (csrc/) will be declared.

No extension is declared yet, so nothing is compiled: `pip install .` gives the pure Python package on every machine.
"""

from setuptools import setup

setup()
