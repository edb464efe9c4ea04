"""Models for the tests of the engine."""

from tiny_models import models as models
