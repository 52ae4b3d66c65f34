"""Reference engine: batch-one lossless EAGLE decoding in plain PyTorch."""
