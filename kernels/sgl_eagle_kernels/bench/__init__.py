"""Times the kernels on a GPU, each only after it agreed with its reference on the same input."""
