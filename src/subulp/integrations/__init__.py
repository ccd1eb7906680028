"""One module for each framework, which is imported only by the module that is for it."""
