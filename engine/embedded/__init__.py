"""The embedded LLM engine: paged KV cache, continuous batching, OpenAI-compatible HTTP."""
