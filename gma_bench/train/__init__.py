"""Training a cell: the module, the loop around it, and what makes it resume."""
