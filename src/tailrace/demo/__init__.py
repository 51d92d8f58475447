"""Sample events for ``tailrace demo``: jobs, posts, a shop, carts and cars."""
