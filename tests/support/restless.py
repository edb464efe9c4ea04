"""A policy that changes the shape of speculation by chance."""

import random

from eagle_kit.core.shape import NO_SPECULATION
from eagle_kit.tuning.acceptance import AcceptanceTable
from eagle_kit.tuning.policy import ShapePolicy


class Restless(ShapePolicy):
    """Chooses one of ``shapes`` by chance, plain decoding for up to ``most_plain`` cycles now and then."""

    def __init__(self, seed, shapes, most_plain=50):
        super().__init__(lambda batch_size, shape, context: 1.0, AcceptanceTable.even(shapes), {1: shapes})
        self.rng, self.plain, self.most_plain, self.used = random.Random(seed), 0, most_plain, set()

    def choose(self, eases, context):
        if self.plain:
            self.plain -= 1
            return NO_SPECULATION
        if self.rng.random() < 0.1:
            self.plain = self.rng.randrange(self.most_plain)
        shape = self.rng.choice(self.shapes)
        self.used.add(shape)
        return shape
