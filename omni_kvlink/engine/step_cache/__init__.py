"""Cache backends, which reuse what an earlier denoising step computed."""
