"""SGLang plugin: the only code of the project that imports sglang."""
