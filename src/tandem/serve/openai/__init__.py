"""OpenAI's API over any engine: routes, request parsing, response choices, streams."""
