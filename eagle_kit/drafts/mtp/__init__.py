"""MTP modules of DeepSeek-V3 (arXiv 2412.19437)."""
