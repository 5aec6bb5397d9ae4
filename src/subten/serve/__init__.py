"""An OpenAI-compatible server with its engine in a process of its own."""
