"""The block formats, one module each."""
