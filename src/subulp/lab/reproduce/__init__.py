"""Every table, figure, algorithm and numbered claim of the five papers: what repeats it here."""
