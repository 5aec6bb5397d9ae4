"""The paged KV cache: which page belongs to whom, and the bytes themselves."""
