"""Data sets with very many labels, in the forms of the Extreme Classification Repository."""
