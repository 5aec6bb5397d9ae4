"""What a model's keys and queries look like, and how its cache should store keys because of it."""
