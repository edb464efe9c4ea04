"""A policy that changes the shape of speculation by chance."""

import random

from eagle_kit.autotune.policy import ShapePolicy
from eagle_kit.core.shape import NO_SPECULATION


class Restless(ShapePolicy):
    """Chooses one of ``shapes`` by chance, now and then plain decoding for up to ``most_plain`` cycles."""

    def __init__(self, seed, shapes, most_plain=50):
        super().__init__({1: shapes})
        self.rng = random.Random(seed)
        self.plain = 0
        self.most_plain = most_plain
        self.used = set()

    def choose(self, requests, context):
        if self.plain:
            self.plain -= 1
            return NO_SPECULATION
        if self.rng.random() < 0.1:
            self.plain = self.rng.randrange(self.most_plain)
        shape = self.rng.choice(self.shapes)
        self.used.add(shape)
        return shape
