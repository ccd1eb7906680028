"""Converters that build a data set once."""
