"""A package with a model that Octavo does not know, as a user would install one."""
