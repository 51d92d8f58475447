"""Settings: the tree, the types of its values, their units, and the layers that fill it."""
