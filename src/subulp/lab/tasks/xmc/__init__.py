"""The task ``xmc``: classification over very many labels."""
