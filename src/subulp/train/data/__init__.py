"""Data sets of the tasks: the ones that ship with the package, and readers for others."""
