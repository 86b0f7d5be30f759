"""Conversations as token ids.

conversations.py reads them (records.py has the accepted forms), templates.py renders
messages to ids with a loss mask, parsing.py reads a message from sampled ids as they
arrive (tool_calls.py its calls, text_stream.py its texts), and view.py shows a rendered
conversation.
"""
