"""Drafts in the layouts of other projects, both ways and lossless; ``docs/checkpoints.md`` has the tables.

A draft in our own layout is the pivot: every conversion goes to it or comes from it. What another layout has
no place for rides along in keys that its readers skip (``eagle_kit`` of config.json) or is refused in one
sentence. What a draft from elsewhere has beyond ours is kept in ``eagle_kit.json`` (``imported``), and is
written again when the draft goes back.
"""
