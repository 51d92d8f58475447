"""The command ``tailrace``: what people type, and how answers are printed."""
