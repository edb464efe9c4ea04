"""Conversations: records, chat templates, packing, draft vocabulary."""
