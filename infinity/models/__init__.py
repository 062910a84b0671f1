"""The built-in models: their sizes (torch-free) and the decoder itself."""
