"""A policy that changes the shape of speculation by chance."""

import random

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.shape import NO_SPECULATION


class Restless(ShapePolicy):
    """Chooses one of ``shapes`` by chance, plain decoding for up to ``most_plain`` cycles now and then, and
    in every second cycle how many drafts of each request are verified."""

    def __init__(self, seed, shapes, most_plain=50):
        super().__init__({1: shapes})
        self.rng, self.plain, self.most_plain, self.used = random.Random(seed), 0, most_plain, set()
        self.rng_of_drafts = random.Random(seed)

    def choose(self, requests, context):
        self.num_drafts = None
        if self.plain:
            self.plain -= 1
            return NO_SPECULATION
        if self.rng.random() < 0.1:
            self.plain = self.rng.randrange(self.most_plain)
        shape = self.rng.choice(self.shapes)
        self.used.add(shape)
        if shape.steps and self.rng_of_drafts.random() < 0.5:
            most = self.rng_of_drafts.randrange(shape.tokens)
            self.num_drafts = [self.rng_of_drafts.randint(0, most) for _ in requests]
        return shape
