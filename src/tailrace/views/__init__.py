"""The views: a folder each, with the same file names in each."""
