"""Settings: their tree, the kinds of their values, and how they are read; ``reference.toml`` explains each key."""
