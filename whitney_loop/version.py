"""The version of this package, read by its build too."""

__version__ = "0.1.0"
