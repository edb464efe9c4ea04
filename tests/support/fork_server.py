"""Processes that are forked from one that has made imports and nothing else.

They cost no imports, and no thread of the test's process holds a lock in them. Python has one fork server for
a process, so all tests share this one. What runs in such a process must be a function of a module.
"""

import multiprocessing

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "eagle_kit.cli.serve",
        "eagle_kit.engine.llm",
        "eagle_kit.server.api.app",
        "eagle_kit.train.run.step",
        "eagle_kit.train.run.setup",
        "accelerate",
        "llguidance.hf",
        "pytest",
        "transformers.models.auto.modeling_auto",
        "transformers.tokenization_utils_fast",
        "uvicorn",
    ]
)
