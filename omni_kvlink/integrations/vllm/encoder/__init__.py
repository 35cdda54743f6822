"""The vLLM encoder-cache connector: the encoder runs in one engine, the language model in others."""
