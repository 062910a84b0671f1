"""Bytes of files as tokens, and the windows that training takes from them."""
