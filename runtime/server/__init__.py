"""The HTTP front end: OpenAI's wire format, limits, metrics; it computes no token itself."""
