"""Requests in, tokens out: scheduler, runner, the loop, and `LLM` in front of them."""
