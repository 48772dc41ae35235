"""The paged KV cache: books (pages, blocks, prefixes, swapped sequences) apart from bytes (the pool)."""
