"""Serves a model over HTTP, in the forms that clients of other servers speak.

app.py joins the parts: one file a form (chat.py, completions.py,
openai_responses.py, anthropic_messages.py, token_ids.py), all
over turn.py, which reads one answer, and answers.py, which asks the engine. The guard
of http_server/ stands before them: key, limits, and clients that leave. prefill.py
reads prompts for other servers, and fetching.py lets other servers read them.
"""
