"""Speculative decoding that pays: the SGLang plugin, the reference engine and the command line."""
