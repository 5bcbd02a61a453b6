"""OpenAI's API over any Engine: routes, request parsing, response choices, streams.

Import `openai_service` from routes.py.
"""
