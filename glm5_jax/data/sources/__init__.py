"""Files of documents: formats, spans that fit into memory, held-out shares."""
