"""Documents to batches.

A document goes this way, and each folder imports only those before it:

    file -> documents    sources/: formats, compression, the held-out share
    documents -> ids     tokenizer.py for texts, chat/ for conversations; lossless.py
                         checks that a tokenizer keeps every text
    ids -> rows          rows/: packing, fill-in-the-middle
    rows -> batch        rows/: mixture, order, the rows of a step

preparation/ does the first three once, ahead of training, and stores the rows of a
corpus of any size; without it, a run does all four in memory when it starts.
"""
