"""The vLLM encoder-cache connector: encoder in one engine, language model in others."""
