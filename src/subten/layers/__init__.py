"""The layers of a decoder, each a module over the ops; no model family is known here."""
