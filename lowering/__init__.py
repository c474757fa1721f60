"""The rules: what is kept, expanded, templated or refused, one file an operation class."""
